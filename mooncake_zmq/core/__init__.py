"""What every actor stands on: events and effects, messages, long works, conversations. PURE."""
