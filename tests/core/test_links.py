"""Links that requests miss: for how long such an attempt counts as one that found no room."""

from mooncake_zmq.core.links import LINK_S, MOST_MISSING, MissingLinks


def test_a_link_is_passing_for_a_while_since_it_was_first_missed():
    links = MissingLinks()
    assert links.is_passing(100.0, "d")
    assert links.is_passing(100.0 + LINK_S * 0.9, "d")
    assert not links.is_passing(100.0 + LINK_S, "d"), "however often it is missed meanwhile"
    assert links.is_passing(100.0 + LINK_S, "e")


def test_a_link_that_came_up_may_be_missed_anew():
    links = MissingLinks()
    links.is_passing(0.0, "d")
    links.peer_up("d")
    assert links.is_passing(2 * LINK_S, "d")
    links.peer_up("never missed")


def test_no_more_links_are_remembered_than_the_limit():
    links = MissingLinks()
    assert all(links.is_passing(0.0, f"d{number}") for number in range(MOST_MISSING))
    assert not links.is_passing(0.0, "one more")
    assert links.is_passing(0.0, "d0")
