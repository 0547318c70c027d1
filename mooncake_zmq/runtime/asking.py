"""The operator's files in a process's runtime directory: dumps, requests and their answers; see `operate.local_nodes`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from mooncake_zmq.core import commands
from mooncake_zmq.core.actor import Answered, Asked
from mooncake_zmq.core.node import printable
from mooncake_zmq.core.roles import Role
from mooncake_zmq.transfer.own_files import read_own, replace_own

log = structlog.get_logger()

MAX_REQUESTS = 64
"""Most requests taken at a time; further ones wait for the next signal."""
ANSWERING_ROLES: tuple[Role, ...] = ("conductor",)


class OperatorFiles:
    """Read and write the files of one node, in a directory that belongs to this user alone."""

    def __init__(self, directory: Path, node: str, role: Role) -> None:
        self._directory, self._node, self._role = directory, node, role

    def write_dump(self, state: Mapping[str, Any]) -> None:
        """Write the state of the whole process; a full disk is logged and does not end it."""
        path = self._directory / f"{self._node}.dump.json"
        try:
            replace_own(path, json.dumps(state, default=printable, indent=1).encode())
        except OSError as error:
            log.warning("dump_failed", path=str(path), reason=error.strerror)
        else:
            log.info("dumped", path=str(path))

    def take(self, handle: Callable[[Asked], None]) -> None:
        """Pass each request in the directory to `handle`, and answer invalid ones."""
        for path in sorted(self._directory.glob(f"{self._node}.ask.*.json"))[:MAX_REQUESTS]:
            ask_id = path.name.removeprefix(f"{self._node}.ask.").removesuffix(".json")
            try:
                content = read_own(path)
                path.unlink()
                ask = commands.decode(content)
            except FileNotFoundError:  # the operator's command gave up
                continue
            except OSError as error:
                log.warning("ask_unreadable", path=str(path), reason=error.strerror)
                continue
            except commands.AskError as error:
                self.write_answer(Answered(ask_id, {"error": str(error)}))
                continue
            if self._role not in ANSWERING_ROLES:
                self.write_answer(Answered(ask_id, {"error": f"{self._node} is a {self._role}: ask a conductor"}))
                continue
            log.info("asked", ask=repr(ask))
            handle(Asked(ask_id, ask))

    def write_answer(self, answered: Answered) -> None:
        """Write an answer beside the request; a full disk is logged."""
        path = self._directory / f"{self._node}.answer.{answered.ask_id}.json"
        try:
            replace_own(path, json.dumps(answered.answer).encode())
        except OSError as error:
            log.warning("answer_failed", path=str(path), reason=error.strerror)
