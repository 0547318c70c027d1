"""A KVCache-centric, disaggregated LLM server made of plain processes that speak ZeroMQ."""

from mooncake_zmq import mypyc_code

__version__ = "0.1.0"

mypyc_code.use()
