"""May bytes that were read be trusted? The one rule for live and simulated reads: it decides, and never reads itself. PURE.

A reader of a slot was given its generation and its block checksum (0: not committed yet, so none). Beside the bytes lies a row
of part checksums, one for each layer. The bytes are trusted if, in this order,

    the slot had the generation before the first byte was read       generation_stands
    the row folds to the block checksum that was given               row_stands
    each part hashes to its entry in the row                         part_stands
    the slot still has that generation after the last byte           generation_stands

From a disk slot they are trusted if

    the header beside them has the key and block checksum that were given    header_stands
    their parts' checksums fold to that block checksum                       payload_stands

Users call these through the module, so that a simulation can plant a bug in all reads at once.
"""

from collections.abc import Sequence
from enum import Enum

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.checksum import block_checksum


class ReadFailure(Enum):
    """Why a read gave no block."""

    CORRUPT = "corrupt"
    """The copy named stands, but its bytes or checksums differ from what the reader was given: it should not be found again."""
    UNREACHED = "unreached"
    """It did not come, not in time, or the copy named is no longer there: this says nothing about anybody's bytes."""


def generation_stands(generation: int, named: int, *, committed: bool) -> bool:
    """A committed block must still have its generation; one being written may have been committed meanwhile."""
    return generation == named or (not committed and generation == named + 1)


def row_stands(row: Sequence[int], checksum: int) -> bool:
    """Do a copy's part checksums fold to the block checksum that its reader was given? 0: none was given yet."""
    return checksum == 0 or block_checksum(row) == checksum


def part_stands(found: int, given: int) -> bool:
    """Is the checksum of the bytes read the one in the row? 0 there: the part is not written yet."""
    return found == given != 0


def header_stands(found: tuple[Key, int], given: tuple[Key, int]) -> bool:
    """On disk, does the header (key, block checksum) name the block that the reader was given?"""
    return found == given


def payload_stands(parts: Sequence[int], checksum: int) -> bool:
    """Do the checksums of the parts that came from disk fold to the block checksum? One is always given."""
    return block_checksum(parts) == checksum


def failure(*, stands: bool) -> ReadFailure:
    """The meaning of bytes that are not the expected ones, by whether the generation still `stands`: torn, if the copy was
    taken away meanwhile."""
    return ReadFailure.CORRUPT if stands else ReadFailure.UNREACHED
