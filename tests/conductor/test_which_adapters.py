"""Which vLLMs a request with an adapter may not go to."""

from mooncake_zmq.conductor import adapters
from mooncake_zmq.conductor.adapters import Adapters


def joined(*nodes: str) -> Adapters:
    known = Adapters()
    for node in nodes:
        known.join(node)
    return known


def test_nodes_that_list_others_are_left_out() -> None:
    known = joined("a", "b")
    known.listed("a", ("poet",))
    known.listed("b", ("sql", "poet"))
    assert known.lacking("sql") == {"a"}
    assert known.lacking("poet") == set()


def test_a_node_that_has_listed_nothing_yet_is_left_out_if_another_lists_the_adapter() -> None:
    known = joined("a", "b")
    assert known.lacking("sql") == set(), "nothing is known yet"
    known.listed("b", ("sql",))
    assert known.lacking("sql") == {"a"}
    known.listed("b", ())
    assert known.lacking("sql") == {"b"}, "it is tried before one that is known to lack it"


def test_an_adapter_that_all_lack_may_be_tried_anywhere() -> None:
    known = joined("a", "b", "c")
    known.listed("a", ("poet",))
    known.listed("b", ())
    assert known.lacking("sql") == {"a", "b"}, "the third has not listed any yet"
    known.listed("c", ())
    assert known.lacking("sql") == set()


def test_a_new_list_a_node_that_joins_and_one_that_left_count_at_once() -> None:
    known = joined("a", "b")
    known.listed("b", ("sql",))
    assert known.lacking("sql") == {"a"}
    known.listed("a", ("sql",))
    assert known.lacking("sql") == set()
    known.join("c")
    assert known.lacking("sql") == {"c"}
    known.listed("a", ())
    known.forget("b")
    assert known.lacking("sql") == {"a"}, "none is known to have it any more"


def test_names_that_nothing_lists_are_not_kept_without_limit() -> None:
    known = joined("a")
    for number in range(2 * adapters.MOST_KEPT + 1):
        assert known.lacking(str(number)) == set()
    assert len(known._lacking) <= adapters.MOST_KEPT
