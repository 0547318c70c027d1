"""`mooncake-zmq chaos --tenants`: whoever is flooded gets every token, and a client that does not is found."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_zmq.chaos import tenants
from mooncake_zmq.chaos.floods import KINDS
from mooncake_zmq.chaos.tenants import ANSWER_TOKENS, Bob, Outcome, Row, Served, as_json, percentile

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(300)
def test_beside_every_flood_the_other_tenant_gets_every_token() -> None:
    command = [sys.executable, "-m", "mooncake_zmq", "chaos", "--tenants", "--json", "--seconds", "0.5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert done.returncode == 0
    assert [row["kind"] for row in told["floods"]] == [*KINDS]
    assert all(row["beside_ms"]["count"] for row in told["floods"])
    got = {row["kind"]: row["alice"] for row in told["floods"]}
    assert "403" in got["priorities"]
    assert not Path(told["directory"]).exists()


def asked_of(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> Served:
    """What bob makes of a gateway that always says the same."""
    monkeypatch.setattr(tenants, "POLL_S", 0.0)

    async def run() -> Served:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await Bob("127.0.0.1", server.sockets[0].getsockname()[1], "key").ask_for(0.05)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "status 503"),
        (b"", "status cut"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "no answer: JSONDecodeError"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"choices":[{"token_ids":%a}]}' % ([1] * ANSWER_TOKENS), "wrong tokens"),
    ],
)
def test_errors_and_wrong_tokens_are_found(answer: bytes, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = asked_of(answer, monkeypatch)
    assert not served.latencies_s
    assert {each.partition(" Expecting")[0] for each in served.problems} == {problem}


@pytest.mark.parametrize(
    ("got", "problems"),
    [
        ({}, ["open requests: the flood reached nothing: {}"]),
        ({"cut": 9}, ["open requests: the flood reached nothing: {'cut': 9}"]),
        ({"401": 9}, ["open requests: the flood reached nothing: {'401': 9}"]),
        ({"429": 1}, []),
    ],
)
def test_a_flood_that_reached_nothing_is_found(
    got: dict[str, int], problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answered:
        async def ask_for(self, _duration_s: float) -> Served:
            return Served([0.1])

    async def begin(*_: object) -> asyncio.subprocess.Process:
        said = "import sys; print('begun'); print(sys.argv[1])"
        result = json.dumps({"got": got})
        return await asyncio.create_subprocess_exec(sys.executable, "-c", said, result, stdout=-1, stderr=-1)

    async def none_left(*_: object) -> None: ...

    monkeypatch.setattr(tenants, "RAMP_S", 0.0)
    monkeypatch.setattr(tenants.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(tenants.floods, "begin", begin)
    monkeypatch.setattr(tenants, "_left", none_left)
    run = tenants.TenantsRun(None, (), 0.0, 0.0, lambda _said: None)  # type: ignore[arg-type]
    asyncio.run(run._flood("open requests", None, "", Answered(), None))  # type: ignore[arg-type]
    assert run.outcome.problems == problems


def test_ratios_are_of_the_percentile_99_and_none_where_nothing_was_answered() -> None:
    alone, beside = Served([number / 1000 for number in range(1, 101)]), Served([0.3] * 10)
    row = Row("open requests", alone, beside, {})
    assert percentile(alone.latencies_s, 0.99) == pytest.approx(0.099)
    assert row.ratio == pytest.approx(0.3 / 0.099)
    (told,) = as_json(Outcome(Path(), rows=[Row("connections", alone, Served(), {})]))["floods"]
    assert (told["ratio"], told["beside_ms"]["p99"]) == (None, None)
