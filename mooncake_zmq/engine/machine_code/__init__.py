"""The optional engine in machine code: Numba kernels, the object code made of them, and the engine that calls it."""
