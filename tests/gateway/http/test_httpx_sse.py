"""Streams as httpx and httpx-sse read them, in the soak's client: every event whole, whatever ends a line elsewhere."""

import pytest
from scripted_actor import ScriptedActor, failing, finished, one_by_one, tokens

from mooncake_zmq.chaos.streams import Failed, HttpApi, Refused


def asked(script):
    """The pieces that its client is given, and what he is told of."""
    actor, found, told = ScriptedActor(script), [], []

    async def client(port):
        api = HttpApi()
        try:
            async for piece in api.stream(f"http://127.0.0.1:{port}", [1, 2, 3], 8):
                found.append(piece)
        except (Failed, Refused) as error:
            told.append(error)
        await api.close()

    actor.serve(client)
    return found, told


def test_each_event_is_one_piece():
    text = "a\u2028b\x85c\n\nd"
    pieces, told = asked(lambda _request, _number: one_by_one([*tokens(text), finished()]))
    assert bytes(token for piece in pieces for token in piece.tokens) == text.encode()
    assert [piece.finished for piece in pieces].count(True) == 1
    assert pieces[-1].usage is not None
    assert not told


@pytest.mark.parametrize(("before", "kind"), [("", Refused), ("ab", Failed)])
def test_a_failure_is_told_by_what_it_is(before, kind):
    pieces, (error,) = asked(lambda _request, _number: one_by_one([*tokens(before), failing()]))
    assert type(error) is kind
    assert bytes(token for piece in pieces for token in piece.tokens) == before.encode()
