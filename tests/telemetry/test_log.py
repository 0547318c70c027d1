"""What a process logs: where an error was, never what prompts and keys stood in the variables there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_zmq.telemetry import log_file

FAILS = """
import logging, sys
import structlog
from mooncake_zmq.telemetry import log
from mooncake_zmq.transfer.sockets import BadEndpoint

log.configure(node="n", role="gateway", form=sys.argv[1], level="info")

def answer(prompt):
    secret = b"sesame"
    try:
        raise BadEndpoint("tcp://10.0.0.1:7000 is not ours " + "long " * 500)
    except BadEndpoint:
        raise ValueError(f"cannot answer {prompt!r}")

class Own(OSError):  # a library's, which may say anything
    pass

try:
    answer("what the client asked")
except ValueError as error:
    structlog.get_logger().critical("crashed", exc_info=True)
    logging.getLogger("uvicorn.error").error("Exception in application", exc_info=error)
    logging.getLogger("asyncio").error("Task exception was never retrieved\\nfuture: <Task exception=%r>" % error)
    logging.getLogger("asyncio").error("it failed: %s, %s", error, OSError(28, "No space left on device"))
    try:
        raise ExceptionGroup("several of what the client asked", [error, Own("what the client asked")])
    except ExceptionGroup:
        structlog.get_logger().critical("crashed", exc_info=True)
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_errors_are_told_without_what_a_client_sent(form: str) -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS, form], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    for word in ("client asked", "sesame"):
        assert word not in ended.stderr
    assert ended.stderr.count("BadEndpoint") >= 3
    assert ended.stderr.count("tcp://10.0.0.1:7000 is not ours") >= 3
    assert "it failed: ValueError, OSError: [Errno 28] No space left on device" in ended.stderr
    assert "long " * 100 not in ended.stderr
    assert "uvicorn.error" in ended.stderr
    if form == "json":
        lines = [json.loads(line) for line in ended.stderr.splitlines()]
        assert [line["event"] for line in lines] == ["crashed", "library", "library", "library", "crashed"]
        assert [(each["exc_type"], each["frames"][-1]["name"]) for each in lines[0]["exception"]] == [
            ("ValueError", "answer"),
            ("BadEndpoint", "answer"),
        ]
        assert [each[0]["exc_type"] for each in lines[-1]["exception"][0]["exceptions"]] == ["ValueError", "Own"]


TURNS = """
import os, sys, threading
import structlog
from mooncake_zmq.telemetry import log, log_file

log_file.MAX_BYTES = 40_000
log.configure(node="n", role="decode", form="json", level="info")

def tell(who):
    for number in range(200):
        structlog.get_logger().info("line", who=who, number=number)

writers = [threading.Thread(target=tell, args=(who,)) for who in range(2)]
[each.start() for each in writers]
[each.join() for each in writers]
os.write(1, b"of a library\\n")
os.write(2, b"of the interpreter\\n")
"""


def write_lines(where: Path, told: str) -> tuple[list[str], list[str]]:
    with where.open("ab") as output:
        environment = {**os.environ, log_file.VARIABLE: told, "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, "-c", TURNS], stdout=output, stderr=output, env=environment, timeout=30, check=True)
    before = log_file.older(where)
    return before.read_text().splitlines() if before.exists() else [], where.read_text().splitlines()


def test_a_log_file_is_turned_over_without_losing_a_line(tmp_path: Path) -> None:
    before, now = write_lines(tmp_path / "n.log", str(tmp_path / "n.log"))
    assert 0 < sum(map(len, before)) < 40_000
    assert now[-2:] == ["of a library", "of the interpreter"]
    lines = [json.loads(line) for line in (*before, *now[:-2])]
    for who in range(2):
        assert [line["number"] for line in lines if line["who"] == who] == list(range(200))


def test_a_file_that_standard_error_does_not_go_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.log").write_text("of somebody else\n")
    before, now = write_lines(tmp_path / "n.log", str(tmp_path / "other.log"))
    assert (len(before), len(now)) == (0, 402)
    assert (tmp_path / "other.log").read_text() == "of somebody else\n"


def test_a_log_file_that_cannot_be_turned_over_goes_on_and_is_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "n.log"
    (tmp_path / "n.log.0").mkdir()  # nothing can be opened there
    before, now = write_lines(log, str(log))
    assert (len(before), len(now)) == (0, 402)
    (tmp_path / "n.log.0").rmdir()
    before, _ = write_lines(log, str(log))
    assert before


def test_a_log_file_that_was_removed_begins_anew_and_leaks_no_descriptor(tmp_path: Path) -> None:
    log = tmp_path / "n.log"
    removed = f"""
{TURNS.partition("writers =")[0]}
os.unlink({str(log)!r})
before = len(os.listdir("/proc/self/fd"))
for _ in range(3):
    tell(0)
assert len(os.listdir("/proc/self/fd")) == before, "descriptors leaked"
"""
    with log.open("ab") as output:
        environment = {**os.environ, log_file.VARIABLE: str(log)}
        ended = subprocess.run([sys.executable, "-c", removed], stdout=output, stderr=output, env=environment, timeout=30)
    assert ended.returncode == 0
    assert json.loads(log.read_text().splitlines()[-1])["number"] == 199


FULL = """
import os, resource, sys
import structlog
from mooncake_zmq.telemetry import log

def allow(more):
    limit = os.fstat(2).st_size + more if more else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

log.configure(node="n", role="decode", form=sys.argv[1], level="info")
tell = structlog.get_logger().info
tell("before")
allow(40)
tell("torn")
for number in range(300):
    tell("lost", number=number)
allow(0)
tell("again")
tell("after")
"""


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("named", ["n.log", "none"])
def test_lines_that_a_full_disk_does_not_take_are_lost_and_told(tmp_path: Path, form: str, named: str) -> None:
    where = tmp_path / "n.log"
    with where.open("ab") as output:
        environment = {**os.environ, log_file.VARIABLE: str(tmp_path / named)}
        subprocess.run([sys.executable, "-c", FULL, form], stderr=output, env=environment, timeout=30, check=True)
    before, torn, again, after = where.read_text().splitlines()
    assert "before" in before
    assert len(torn) == 40
    assert "again" in again
    assert "after" in after
    assert "lost_lines" not in after
    if form == "json":
        assert json.loads(again)["lost_lines"] == 301
    else:
        assert "lost_lines=301" in again


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("end", ["full", "closed"])
def test_a_process_whose_log_takes_nothing_goes_on(form: str, end: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb") as full, os.fdopen(write, "wb") as closed:
        output = full if end == "full" else closed
        told = subprocess.run([sys.executable, "-c", FAILS + "print('here')", form], stdout=-1, stderr=output, timeout=30)
    assert (told.returncode, told.stdout) == (0, b"here\n")


CLOSED = """
import os, sys, tempfile
os.close(2)
from mooncake_zmq.telemetry import log_file
lines = log_file.stderr()
with tempfile.TemporaryFile() as file:
    lines.write("a line")
    file.seek(0)
    print(file.fileno() > 2, file.read())
"""


def test_what_is_logged_without_a_standard_error_is_in_no_other_file() -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=30)
    assert ended.stdout.split() == ["True", "b''"]
