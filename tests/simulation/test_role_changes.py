"""Changes of role under faults: everything still ends, both roles go on being served, and nobody changes with work in hand."""

from collections import Counter

from mooncake_zmq.simulation.cluster import CHANGEABLE, ClusterSettings, processes
from mooncake_zmq.simulation.faults import FaultKind
from mooncake_zmq.simulation.run import run_seed

SEEDS = range(300, 306)


def test_seeds_with_many_changes_of_role_hold() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        result = run_seed(seed, stress=[FaultKind.ROLE])
        assert result.failure is None, f"seed {seed}: {result.failure}"
        counts.update(result.coverage["counts"])
    assert counts["role_changes[to=prefill]"] > len(SEEDS) / 2
    assert counts["role_changes[to=decode]"] > len(SEEDS) / 2
    assert counts["role_changes_ended[how=done]"] > len(SEEDS)
    # Nobody takes a node for what it was: such a message would wait for an answer until a deadline.
    misled = ("ReserveDecode", "StartPrefill", "HandoffBlocks")
    assert not [kind for kind in misled if counts[f"unexpected_messages[type={kind}]"]]


def test_a_process_that_may_change_has_a_segment_as_a_prefill_only_and_links_for_both_roles() -> None:
    specs = [spec for spec in processes(ClusterSettings()) if spec.name in CHANGEABLE]
    assert len(specs) == 2 * len(CHANGEABLE)
    for spec in specs:
        assert (spec.slots > 0) == (spec.role == "prefill")
    peers = {spec.name: spec.peers for spec in specs}
    for name, its in peers.items():
        assert all(name in peers[other] for other in its if other in peers), "a link has two ends"
    assert "prefill-a" in peers["prefill-b"]
