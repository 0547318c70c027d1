"""Forms in which matrices of weights are held: panels, and the few bits of their file."""
