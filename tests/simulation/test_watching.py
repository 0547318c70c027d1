"""Watched seeds: what looking on keeps is bounded, and the checker of that can fail."""

import pytest

from mooncake_zmq.core.transfer_stats import TransferStats
from mooncake_zmq.core.watch import Looking, Watchers
from mooncake_zmq.simulation.run import run_seed

WATCHED = 4


def test_what_is_never_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferStats, "end", lambda *_: None)
    failure = run_seed(WATCHED).failure
    assert failure is not None
    assert "of watchers, reports and transfers" in failure


def test_reports_come_in_a_watched_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: set[str] = set()
    receive, due = Looking.receive_report, Watchers.due
    most = 0

    def hearing(self: Looking, now: float, peer: str, report: object) -> None:
        heard.add(peer.rsplit("-", 1)[0])
        receive(self, now, peer, report)  # type: ignore[arg-type]

    def counting(self: Watchers, now: float) -> list[str]:
        nonlocal most
        most = max(most, len(self))
        return due(self, now)

    monkeypatch.setattr(Looking, "receive_report", hearing)
    monkeypatch.setattr(Watchers, "due", counting)
    assert run_seed(WATCHED).failure is None
    assert heard == {"conductor", "prefill", "decode", "cache-node", "gateway"}
    assert most == 2
