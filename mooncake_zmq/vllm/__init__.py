"""Our pool under vLLM: a KV connector for its engines. Only `connector.py` imports vLLM or torch."""
