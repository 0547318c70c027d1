"""Machine code of the package's own modules, compiled by mypyc."""
