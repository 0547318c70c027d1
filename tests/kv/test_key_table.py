"""The key table against a dict."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_zmq.kv.key_table import KeyTable

CAPACITY = 12


def with_home(home):
    """Keys that all want the same place of the table of that capacity."""
    table = KeyTable(CAPACITY)
    words = np.stack([np.arange(900, dtype="<u8"), np.arange(900, dtype="<u8") * 7], axis=1)
    at = np.flatnonzero(table._homes(words[:, 0], words[:, 1]) == home % table._size)
    return [words[index].tobytes() for index in at[:16]]


KEYS = [*with_home(3), *with_home(4), *with_home(-1)]
"""Long probe chains, one into the other, and one that goes over the end of the table."""


def digest(number):
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:16]


class KeyTableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = KeyTable(CAPACITY)
        self.model = {}

    @rule(key=st.sampled_from(KEYS), slot=st.integers(0, CAPACITY - 1))
    def insert(self, key, slot):
        if slot in self.model.values():
            with pytest.raises(AssertionError):
                self.table.insert(key, slot)
        elif key not in self.model:
            self.table.insert(key, slot)
            self.model[key] = slot

    @rule(slot=st.integers(0, CAPACITY - 1))
    def remove(self, slot):
        key = next((key for key, held in self.model.items() if held == slot), None)
        if key is None:
            with pytest.raises(AssertionError):
                self.table.remove(slot)
        else:
            assert self.table.remove(slot) == key
            del self.model[key]

    @invariant()
    def agrees(self):
        assert len(self.table) == len(self.model)
        assert [self.table.get(key) for key in KEYS] == [self.model.get(key) for key in KEYS]
        assert list(self.table.slots_of(KEYS)) == [self.model.get(key, -1) for key in KEYS]
        assert self.table.find_many(b"".join(KEYS)).tolist() == [self.model.get(key, -1) for key in KEYS]
        by_slot = {slot: key for key, slot in self.model.items()}
        assert [self.table.key_of(slot) for slot in range(CAPACITY)] == [by_slot.get(slot) for slot in range(CAPACITY)]
        assert self.table.named().tolist() == [slot in by_slot for slot in range(CAPACITY)]


TestKeyTableMachine = KeyTableMachine.TestCase
TestKeyTableMachine.settings = settings(max_examples=100, stateful_step_count=40)


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=200), st.binary(min_size=16, max_size=16))
def test_one_lookup_and_many_agree_on_any_bytes(keys, other):
    table = KeyTable(len(keys))
    for slot, key in enumerate(keys):
        table.insert(key, slot)
    asked = [other, *keys, other]
    found = table.find_many(b"".join(asked))
    assert found.dtype == np.int32
    assert found.tolist() == [-1 if (slot := table.get(key)) is None else slot for key in asked]


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_keys_that_count_up_are_spread(byteorder):
    table = KeyTable(1000)
    for slot in range(1000):
        table.insert((10**6 + slot).to_bytes(16, byteorder), slot)
    away = [(at - table._home[slot]) % table._size for at, slot in enumerate(table._table) if slot >= 0]
    assert max(away) < 20


def test_a_table_that_was_full_many_times_finds_what_it_holds_and_nothing_else():
    table = KeyTable(500)
    for number in range(5_000):
        if number >= 500:
            assert table.remove(number % 500) == digest(number - 500)
        table.insert(digest(number), number % 500)
    numbers = range(4_000, 5_500)
    found = table.find_many(b"".join(map(digest, numbers))).tolist()
    assert found == [number % 500 if 4_500 <= number < 5_000 else -1 for number in numbers]


@pytest.mark.parametrize("capacity", [0, 1])
def test_the_smallest_tables_work(capacity):
    table = KeyTable(capacity)
    assert table.get(digest(1)) is None
    assert table.find_many(digest(1) * 100).tolist() == [-1] * 100
    assert table.find_many(b"").tolist() == []


def test_half_a_key_is_an_error():
    with pytest.raises(ValueError, match="17 bytes"):
        KeyTable(1).find_many(b"x" * 17)
