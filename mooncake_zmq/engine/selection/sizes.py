"""The sizes of what selectors keep of a token, which their machine code shares."""

SUBSPACES, BITS = 2, 6
"""Parts of a key and bits of each part's code, as in PQCache's scripts: SUBVEC=2, SUBBITS=6."""
CENTROIDS = 1 << BITS
BLOCK_TOKENS = 16
"""Tokens of a block that has bounds, as in Quest's pages."""
