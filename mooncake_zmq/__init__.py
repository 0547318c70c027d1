"""A KVCache-centric, disaggregated LLM server made of plain processes that speak ZeroMQ."""

__version__ = "0.1.0"
