"""One host's pool: the memory and the SSD that a cache-node lends to prefill and decode nodes and to store clients."""
