"""Rules of a store's tables: cells, leases, puts, eviction, the log on SSD. Pure."""
