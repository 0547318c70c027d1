"""What a process logs: where an error was, never what prompts and keys stood in the variables there."""

import json
import subprocess
import sys

import pytest

FAILS = """
import logging, sys
import structlog
from mooncake_zmq.runtime import log

log.configure(node="n", role="gateway", form=sys.argv[1], level="info")

def answer(prompt):
    secret = b"sesame"
    raise ValueError("cannot answer " + "long " * 500)

try:
    answer("what the client asked")
except ValueError as error:
    structlog.get_logger().critical("crashed", exc_info=True)
    logging.getLogger("uvicorn.error").error("Exception in application", exc_info=error)
    try:
        raise ExceptionGroup("several", [error])
    except ExceptionGroup:
        structlog.get_logger().critical("crashed", exc_info=True)
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_errors_are_told_without_the_variables_they_met(form: str) -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS, form], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    for word in ("client asked", "sesame"):
        assert word not in ended.stderr
    assert ended.stderr.count("cannot answer") >= 3
    assert "long " * 100 not in ended.stderr
    assert "uvicorn.error" in ended.stderr
    if form == "json":
        lines = [json.loads(line) for line in ended.stderr.splitlines()]
        assert [line["event"] for line in lines] == ["crashed", "library", "crashed"]
        assert lines[0]["exception"][0]["frames"][-1]["name"] == "answer"
