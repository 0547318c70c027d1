"""All bytes of a slot, which no process of ours looks at: they work by parts."""

from mooncake_zmq.transfer.shared_memory import Segment


def slot_bytes(segment: Segment, slot: int) -> memoryview:
    """Padding included, writable where the segment is."""
    view: memoryview = segment._bytes[slot].data
    return view
