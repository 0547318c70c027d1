"""Drivers of other programs beside ours, and the processes that hold them: engines, vLLM, stores, routers."""
