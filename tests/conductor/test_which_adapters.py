"""Which vLLMs a request with an adapter may not go to."""

from mooncake_zmq.conductor import adapters
from mooncake_zmq.conductor.adapters import Adapters


def lacking(known: Adapters, adapter: str, vllms: int) -> set[str]:
    return set(known.lacking(adapter, lambda: vllms))


def test_nodes_that_list_others_are_left_out_and_those_that_listed_nothing_are_not() -> None:
    known = Adapters()
    known.listed("a", ("poet",))
    known.listed("b", ("sql", "poet"))
    assert lacking(known, "sql", 3) == {"a"}
    assert lacking(known, "poet", 3) == set()
    assert lacking(known, "other", 3) == {"a", "b"}


def test_an_adapter_that_all_lack_may_be_tried_anywhere() -> None:
    known = Adapters()
    known.listed("a", ())
    known.listed("b", ())
    assert lacking(known, "sql", 2) == set()


def test_a_new_list_and_a_node_that_left_count_at_once() -> None:
    known = Adapters()
    known.listed("a", ())
    known.listed("b", ("sql",))
    assert lacking(known, "sql", 2) == {"a"}
    known.listed("a", ("sql",))
    assert lacking(known, "sql", 2) == set()
    known.listed("a", ())
    known.forget("b")
    assert lacking(known, "sql", 2) == {"a"}
    assert lacking(known, "sql", 1) == set()


def test_names_that_nothing_lists_are_not_kept_without_limit() -> None:
    known = Adapters()
    known.listed("a", ("sql",))
    for number in range(2 * adapters.MOST_KEPT + 1):
        assert lacking(known, str(number), 2) == {"a"}
    assert len(known._lacking) <= adapters.MOST_KEPT
