"""Machine code of the package's own modules, by mypyc."""
