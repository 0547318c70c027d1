"""The runbook names every alarm there is, and no command or file that there is not."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.gateway.cluster import REASONS

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "systemd/RUNBOOK.md").read_text()
ALARM = re.compile(r'log\.(?:error|critical)\(\s*"([a-z_]+)"')
SOURCES = {path: path.read_text() for path in (ROOT / "mooncake_zmq").rglob("*.py")}


def test_every_error_of_the_log_is_an_alarm_with_something_to_do() -> None:
    told = {name for text in SOURCES.values() for name in ALARM.findall(text)}
    assert len(told) > 10
    assert sorted(name for name in told if f"`{name}`" not in TEXT) == []


def test_every_way_to_be_degraded_is_an_alarm() -> None:
    assert [reason for reason in REASONS if f"`{reason}`" not in TEXT] == []


def test_every_alarm_is_one_that_something_tells() -> None:
    alarms = TEXT.partition("## Alarms")[2]
    named = {word for line in alarms.splitlines() for word in re.findall(r"`([a-z]+_[a-z_]+)`", line)}
    everything = "".join(SOURCES.values())
    assert sorted(name for name in named if name.removeprefix("mooncake_").removesuffix("_total") not in everything) == []


def test_every_file_that_it_copies_is_there() -> None:
    for name in re.findall(r"/opt/mooncake-zmq/(configs/\S+\.toml)", TEXT):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\b(bin/[a-z]+)", TEXT):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("command", sorted(set(re.findall(r"mooncake-zmq ((?:config )?[a-z]+) ", TEXT))))
def test_every_command_of_the_program_is_there(command: str) -> None:
    assert CliRunner().invoke(main, [*command.split(), "--help"]).exit_code == 0
