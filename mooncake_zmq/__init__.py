"""A KVCache-centric, disaggregated LLM server made of plain processes that speak ZeroMQ."""

from mooncake_zmq import compiled

__version__ = "0.1.0"

compiled.use()
