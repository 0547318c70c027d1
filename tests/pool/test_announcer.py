"""What conductors are told of a pool, in messages that keep none of them for long."""

import pytest

from mooncake_zmq.pool.node.announcer import MAX_ANNOUNCED, announcements


def keys(count, start=0):
    return [number.to_bytes(16, "big") for number in range(start, start + count)]


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 2, 1), (MAX_ANNOUNCED, 0, 0), (MAX_ANNOUNCED, 1, 0), (9000, 5000, 1)])
def test_every_key_is_told_once_in_messages_of_bounded_size(counts):
    stored, removed, on_disk = keys(counts[0]), keys(counts[1], 20_000), keys(counts[2], 40_000)
    messages = announcements(stored, removed, on_disk)
    for message in messages:
        assert 0 < len(message.stored) + len(message.removed) + len(message.on_disk) <= MAX_ANNOUNCED
    assert [key for message in messages for key in message.stored] == stored
    assert [key for message in messages for key in message.removed] == removed
    assert [key for message in messages for key in message.on_disk] == on_disk
