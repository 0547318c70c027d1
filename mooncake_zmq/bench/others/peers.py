"""The processes of `bench pool` and `bench engine`: stores and engines, each in its own Python. See the two drivers."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import click

from mooncake_zmq.refused import Refused

DRIVER = Path(__file__).with_name("store_driver.py")
ANSWER_TIMEOUT_S = 300.0
END_TIMEOUT_S = 20.0


class Peer:
    """One driver process: `ready` is its first answer."""

    def __init__(self, process: "subprocess.Popen[str]", errors: IO[bytes], what: str, timeout_s: float) -> None:
        self.pid = process.pid
        self._process = process
        self._errors = errors
        self._what = what
        self._timeout_s = timeout_s
        self.ready = self._answer()

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Have the driver do one round. Raises click.ClickException with the end of the driver's output when it dies or
        hangs."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": method, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], self._timeout_s)[0]:
            raise self._failure(f"gave no answer within {self._timeout_s:g} s")
        line = output.readline()
        if not line:
            raise self._failure("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, how: str) -> click.ClickException:
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").splitlines()[-15:]
        return click.ClickException("\n".join([f"{self._what} {how}:", *words]))


@contextmanager
def peer(order: dict[str, Any], *, python: str = sys.executable) -> Iterator[Peer]:
    """Run one side of a store in the Python at `python` within the context. `order`: see `store_driver`."""
    what = f"the {order['role']} of {order['store']}"
    with driver_process(DRIVER, order, python=python, what=what, timeout_s=ANSWER_TIMEOUT_S) as driver:
        yield driver


@contextmanager
def driver_process(
    driver: Path,
    order: dict[str, Any],
    *,
    python: str,
    what: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Peer]:
    """Run the file `driver` with `order` within the context. `timeout_s`: for each answer; `what`: its name in errors.

    Raises click.ClickException when there is no such Python.
    """
    with TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [python, str(driver), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise Refused(f"{what} cannot be started: {python}: {error.strerror}") from None
        try:
            yield Peer(process, errors, what, timeout_s)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
