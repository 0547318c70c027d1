"""A KV connector that lets vLLM's engines use our pool. Only `connector.py` imports vLLM or torch."""
