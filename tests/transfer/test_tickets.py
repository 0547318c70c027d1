"""Tickets: both sides show that they know the secret, and nothing that was seen on the wire lets anybody in."""

import pytest

from mooncake_zmq.transfer import tickets as tickets_module
from mooncake_zmq.transfer.tickets import (
    CHALLENGE_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    TOKEN_BYTES,
    Attaching,
    Challenge,
    Refused,
    Ticket,
    Tickets,
)


def shaken(tickets, ticket):
    """The keys that either side ends with."""
    client = Attaching(ticket)
    server = Challenge(tickets, client.opening)
    proof, keys = client.answer(server.challenge)
    server.check(proof)
    assert (len(client.opening), len(server.challenge), len(proof)) == (OPENING_BYTES, CHALLENGE_BYTES, PROOF_BYTES)
    return keys, server.keys


@pytest.mark.parametrize("sealed", [True, False])
def test_both_sides_have_the_same_keys_and_each_stream_its_own(sealed):
    tickets = Tickets(sealed=sealed)
    ticket = tickets.make()
    made = [shaken(tickets, ticket) for _ in range(3)]
    assert all(ours == theirs for ours, theirs in made)
    assert len({ours.proof for ours, _ in made}) == 3
    keys = [key for ours, _ in made for key in (ours.to_server, ours.to_client)]
    assert len(set(keys)) == (6 if sealed else 1)
    assert (None in keys) is not sealed


def test_a_token_without_its_secret_a_made_up_one_and_another_servers_are_refused():
    tickets = Tickets(sealed=True)
    ticket = tickets.make()
    with pytest.raises(Refused):
        shaken(tickets, Ticket(ticket.token, tickets.make().secret, True))
    for other in (Tickets(sealed=True).make(), Ticket(bytes(TOKEN_BYTES), ticket.secret, True)):
        with pytest.raises(Refused):
            Challenge(tickets, Attaching(other).opening)
    for opening in (b"", bytes(OPENING_BYTES), Attaching(ticket).opening[:-40], b"x" + Attaching(ticket).opening[1:]):
        with pytest.raises(Refused):
            Challenge(tickets, opening)


def test_who_thinks_otherwise_of_sealing_is_refused():
    tickets = Tickets(sealed=True)
    ticket = tickets.make()
    with pytest.raises(Refused):
        shaken(tickets, Ticket(ticket.token, ticket.secret, False))


def test_a_proof_that_was_recorded_opens_no_other_stream_and_a_servers_own_is_none():
    tickets = Tickets(sealed=False)
    client = Attaching(tickets.make())
    server = Challenge(tickets, client.opening)
    proof, _ = client.answer(server.challenge)
    server.check(proof)
    again = Challenge(tickets, client.opening)
    for recorded in (proof, again.challenge[-PROOF_BYTES:], b"", bytes(PROOF_BYTES)):
        with pytest.raises(Refused):
            again.check(recorded)


def test_a_client_proves_nothing_to_who_does_not_know_the_secret():
    ticket = Tickets(sealed=True).make()
    client = Attaching(ticket)
    for challenge in (bytes(CHALLENGE_BYTES), b"", client.opening[:CHALLENGE_BYTES]):
        with pytest.raises(Refused):
            client.answer(challenge)


def test_a_ticket_is_good_for_its_time(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(tickets_module.time, "monotonic", lambda: now)
    tickets = Tickets(sealed=False, ttl_s=30.0)
    token = tickets.make().token
    now += 30
    assert tickets.is_good(token)
    now += 1
    assert not tickets.is_good(token)


def test_no_secret_and_no_key_is_shown():
    tickets = Tickets(sealed=True)
    ticket = tickets.make()
    keys, _ = shaken(tickets, ticket)
    for secret in (ticket.secret, keys.proof, keys.to_server, keys.to_client):
        assert repr(secret) not in repr((ticket, keys))


def test_a_ticket_tells_its_server_whose_key_it_was_handed_to(monkeypatch):
    tickets = Tickets(sealed=True)
    tokens = {holder: tickets.make(holder).token for holder in ("ruby", "sky", "")}
    assert {holder: tickets.holder_of(token) for holder, token in tokens.items()} == {each: each for each in tokens}
    monkeypatch.setattr(tickets_module, "MAX_HOLDERS", 3)
    assert tickets.holder_of(tickets.make("one too many").token) == ""
    assert tickets.holder_of(tickets.make("ruby").token) == "ruby"
