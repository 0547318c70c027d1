"""The basis of every actor: events and effects, messages, long works, conversations. PURE."""
