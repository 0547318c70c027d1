"""Executes an actor's works on threads beside the runtime's."""
