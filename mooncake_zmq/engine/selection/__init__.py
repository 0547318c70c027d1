"""Decode that attends to few of many tokens, whose KV is far. Approximate, and a sequence's private state: no pool has it."""
