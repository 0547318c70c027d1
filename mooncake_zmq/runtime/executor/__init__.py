"""Carries out an actor's works live, on threads beside the runtime's."""
