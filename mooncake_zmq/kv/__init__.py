"""What a block is: layout, hash keys, checksums, leases. Pure."""
