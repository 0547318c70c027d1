"""Every command of the README and the pages is tried at toy size, or named with the reason why it is not."""

import re
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from page_commands import LIVE, NOT_RUN, ROOT, TOY_SIZE, PageCommand, how, page_commands

from mooncake_zmq.cli import main
from mooncake_zmq.telemetry.usage import Meter

COMMANDS = page_commands()
TRACE = "".join(
    f'{{"timestamp": {1000 * number}, "input_length": 1000, "output_length": 8, "hash_ids": [1, {number}]}}\n'
    for number in range(40)
)
USED_AT = datetime(2026, 11, 27, tzinfo=UTC).timestamp()
KEYS_FIRST = ("keys rotate", "keys drop")


def test_the_pages_have_commands_and_continued_ones_are_whole() -> None:
    assert len(COMMANDS) > 80
    chat = next(command for command in COMMANDS if command.line.startswith("curl -s localhost:8000/v1/chat"))
    assert chat.words[-2] == "-d"
    assert PageCommand(
        "README", ("mooncake-zmq", "config", "units", *(["/etc/mooncake-zmq/cluster.toml", "--host", "host-a"]))
    ) in (COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_every_command_is_run_somewhere_or_named_with_the_reason(command: PageCommand) -> None:
    ways = [table for table in (TOY_SIZE, LIVE, NOT_RUN) if how(command, table) is not None]
    assert len(ways) == 1, f"{command.line}: put it into one table of tests/helpers/page_commands.py"


@pytest.mark.parametrize("pattern", [*TOY_SIZE, *LIVE, *NOT_RUN])
def test_no_table_names_a_command_that_no_page_has(pattern: str) -> None:
    assert any(re.match(pattern, command.line) for command in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if how(command, TOY_SIZE) is not None],
    ids=lambda command: f"{command.page}: {command.line[:60]}",
)
def test_a_command_of_a_page_ends_well(command: PageCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conversation_trace.jsonl").write_text(TRACE)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    known = {
        "/etc/mooncake-zmq/cluster.toml": str(ROOT / "configs/toy.toml"),
        "cluster.toml": str(ROOT / "configs/toy.toml"),
        "HOST": "host-a",
        "conversation:requests=2000,rate=3.3": "conversation:requests=20,rate=3.3",
        "NODE": "decode-a",
        "~/models/qwen3.gguf": "toy",
        "/etc/mooncake-zmq/api_keys": "api_keys",
        "/var/lib/mooncake-zmq/usage": "usage",
        "keys": "keys",
    }
    meter = Meter(tmp_path / "usage", "gateway-0", now=lambda: USED_AT)
    meter.note("alice", prompt=1, cached=(0, 0, 0), completion=1)
    meter.write()
    extra = (how(command, TOY_SIZE) or "").replace("RUNTIME", str(tmp_path / "run")).split()
    words = [known.get(word, word) for word in command.words[1:]]
    if "--plot" in words and find_spec("matplotlib") is None:
        at = words.index("--plot")
        del words[at : at + 2]
    runner = CliRunner()
    if " ".join(command.words[1:3]) in KEYS_FIRST:
        assert runner.invoke(main, ["keys", "make", "--config", known["cluster.toml"], "--to", "keys"]).exit_code == 0
    if command.words[1:3] == ("keys", "drop"):
        assert runner.invoke(main, ["keys", "rotate", "decode-a", "--in", "keys"]).exit_code == 0
    result = runner.invoke(main, [*words, *extra], catch_exceptions=False)
    # doctor's 1 is a warning about this machine, and 2 a port that something else uses.
    assert result.exit_code == 0 or words[0] == "doctor", result.output
