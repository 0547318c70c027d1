"""Length of prefill chunks, for the prefills that compute them and the conductors that predict when. PURE."""


def chunk_stop(start: int, end: int, chunk_tokens: int) -> int:
    """Return the end of the chunk that begins at `start`: whole blocks (chunk_tokens is a multiple of them) up to `end`.

    A remainder of less than a quarter chunk is added to it: a tiny chunk costs nearly a whole pass over the weights.
    """
    stop = start + chunk_tokens
    return end if end - stop < chunk_tokens // 4 else stop


def longest_chunk(length: int, chunk_tokens: int) -> int:
    """Return the upper bound of the chunks of a prompt of `length` tokens."""
    return min(length, chunk_tokens + max(0, chunk_tokens // 4 - 1))
