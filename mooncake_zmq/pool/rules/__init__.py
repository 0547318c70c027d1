"""What a store's tables may do: cells, leases, puts, eviction, the log on SSD. Pure."""
