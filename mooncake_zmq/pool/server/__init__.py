"""A store as a cache-node serves it: sockets, shared memory, threads and disk. It decides nothing."""
