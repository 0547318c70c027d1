"""A store as other processes see it, over shared memory or streams."""
