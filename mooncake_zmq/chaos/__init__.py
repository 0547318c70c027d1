"""Real processes that are broken on purpose, while clients compare every token."""
