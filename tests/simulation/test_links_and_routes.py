"""Every message that an actor sends has a link: nobody speaks to a process that the table of conversations leaves out."""

from typing import Any, get_args

import pytest

from mooncake_zmq.core import routes
from mooncake_zmq.core.messages import Message
from mooncake_zmq.core.session import Session
from mooncake_zmq.simulation import run
from mooncake_zmq.simulation.run import run_seed

SEEDS = (*range(9), 12, 44)


def test_every_message_type_that_is_sent_has_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: set[type] = set()
    without: set[tuple[str, str, str]] = set()
    send = Session.send

    def recording(self: Session, now: float, to: str, message: Message, **options: Any) -> Any:
        sent.add(type(message))
        if to not in self._peers:
            without.add((self.me, to, type(message).__name__))
        return send(self, now, to, message, **options)

    monkeypatch.setattr(Session, "send", recording)
    for seed in SEEDS:
        assert run_seed(seed).failure is None
    assert not without
    never = {message.__name__ for message in get_args(Message)} - {kind.__name__ for kind in sent}
    assert never <= {"Hello", "Goodbye", "CacheLoad"}, "these seeds say nothing about what they never send"


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
