"""Every message that an actor sends has a link: no process sends to one that the table of conversations leaves out."""

import pytest

from mooncake_zmq.core import routes
from mooncake_zmq.core.actor import Effect, Event, Send
from mooncake_zmq.core.messages import ReleaseLease
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.simulation import run
from mooncake_zmq.simulation.run import run_seed


def test_a_message_to_a_process_without_a_link_fails_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed checks this; `test_seeds_hold_and_cover` asserts that they send every type of message."""
    handle = Prefill.handle

    def sends_astray(self: Prefill, now: float, event: Event) -> list[Effect]:
        return [*handle(self, now, event), Send("prefill-z", ReleaseLease(lease_id=1))]

    monkeypatch.setattr(Prefill, "handle", sends_astray)
    result = run_seed(2)
    assert result.invariant == "I4"
    assert "sends prefill-z a ReleaseLease without a link" in str(result.failure)


def failed_handoff_blocks() -> int:
    return sum(run_seed(seed).coverage["counts"].get("handoff_blocks_failed", 0) for seed in range(3))


def test_seeds_miss_a_link_that_only_reads_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handoff may name blocks in the pool of the prefill's host, of which the decode has to have been told."""
    for draw in ("draw_faults", "draw_halts"):  # copies fail for many reasons; here for one alone
        monkeypatch.setattr(run, draw, lambda *_, **__: ())
    with_all = failed_handoff_blocks()
    link = (("decode", "cache-node"), ("cache-node", "decode"))
    monkeypatch.setattr(routes, "_ON_ONE_HOST", routes._ON_ONE_HOST + link)
    assert with_all == 0
    assert failed_handoff_blocks() > 0
