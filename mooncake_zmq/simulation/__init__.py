"""The same actors under virtual time and seeded faults."""
