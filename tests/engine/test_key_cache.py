"""Kept block keys are those that the chain has, for whoever asks, in bounded memory."""

from random import Random

import pytest

from mooncake_zmq.engine import key_cache
from mooncake_zmq.engine.key_cache import PART_BLOCKS, KeyCache
from mooncake_zmq.engine.recent_values import ENTRY_BYTES
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens

BLOCK = 4


def prompt(seed: int, blocks: float) -> bytes:
    return pack_tokens(Random(seed).choices(range(1000), k=round(blocks * BLOCK)))


@pytest.mark.parametrize("parts", [0, 0.5, 1, 1.999, 2, 2.01, 5.3])
def test_keys_are_those_of_the_chain_first_and_again(parts: float) -> None:
    cache, tokens = KeyCache(), prompt(1, parts * PART_BLOCKS)
    for _ in range(2):
        assert cache.extend(b"r" * 16, tokens, BLOCK) == extend_keys(b"r" * 16, tokens, BLOCK)


def test_a_prompt_that_begins_alike_has_its_own_keys_from_where_it_differs() -> None:
    cache, tokens = KeyCache(), prompt(1, 3 * PART_BLOCKS)
    cache.extend(b"r" * 16, tokens, BLOCK)
    for at in range(0, len(tokens), 173):
        other = tokens[:at] + bytes([tokens[at] ^ 1]) + tokens[at + 1 :]
        assert cache.extend(b"r" * 16, other, BLOCK) == extend_keys(b"r" * 16, other, BLOCK)


def test_roots_and_block_sizes_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of both block sizes are of the same tokens here, so only their names tell them apart."""
    cache, tokens = KeyCache(), prompt(1, 4 * PART_BLOCKS)
    for root in (b"r" * 16, b"s" * 16):
        for block in (BLOCK, BLOCK // 2):
            monkeypatch.setattr(key_cache, "PART_BLOCKS", PART_BLOCKS * BLOCK // block)
            assert cache.extend(root, tokens, block) == extend_keys(root, tokens, block)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the bytes of tokens that are hashed block by block are added."""
    found: list[int] = []

    def counting(parent: bytes, raw: bytes, block: int) -> list[bytes]:
        found.append(len(raw))
        return extend_keys(parent, raw, block)

    monkeypatch.setattr(key_cache, "extend_keys", counting)
    return found


def test_the_next_turn_hashes_no_block_of_the_last_one_again(hashed: list[int]) -> None:
    cache, tokens, more = KeyCache(), prompt(1, 10 * PART_BLOCKS), prompt(2, 3)
    cache.extend(b"r" * 16, tokens, BLOCK)
    hashed.clear()
    assert cache.extend(b"r" * 16, tokens + more, BLOCK) == extend_keys(b"r" * 16, tokens + more, BLOCK)
    assert sum(hashed) == len(more)


def test_what_is_kept_is_bounded_and_the_least_recently_used_goes_first(hashed: list[int]) -> None:
    most = 3 * (ENTRY_BYTES + 16 * PART_BLOCKS)
    cache = KeyCache(max_bytes=most)
    first, second, third, fourth = (prompt(seed, PART_BLOCKS) for seed in range(4))
    for tokens in (first, second, third, first, fourth):
        cache.extend(b"r" * 16, tokens, BLOCK)
    hashed.clear()
    for tokens in (first, third, fourth):
        cache.extend(b"r" * 16, tokens, BLOCK)
    assert not sum(hashed)
    assert cache.kept_bytes == most
    cache.extend(b"r" * 16, second, BLOCK)
    assert sum(hashed) == len(second)
