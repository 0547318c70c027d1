"""Runs an installed unit as its files say where systemd is not there to: command, environment, limits, notify socket."""

import contextlib
import ctypes
import os
import resource
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from toy_cluster import ROOT, eventually, free_port

from mooncake_zmq.core.profile import PrefillTime, Profile, StepTime
from mooncake_zmq.operate.local_nodes import collect_dumps

UNITS = "usr/local/lib/systemd/system"
LISTS = ("Environment",)
PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 38, 65, 1
HASTE = 60
"""The watchdog's time is divided by this: tests do not wait for half a minute."""


CONFIG = """
[cluster]
name = "units"
shm_dir = "{shm}"
drain_timeout_s = 40.0
[model]
path = "toy"
max_model_len = 4096
[cache_node]
pool_bytes = 4_194_304
[prefill]
slab_bytes = 8_388_608
[gateway]
http_port = {port}
[[nodes]]
name = "conductor-0"
role = "conductor"
[[nodes]]
name = "cache-a"
role = "cache-node"
endpoint = "tcp://127.0.0.1:{control}"
data_endpoint = "tcp://127.0.0.1:{data}"
[[nodes]]
name = "prefill-a"
role = "prefill"
[[nodes]]
name = "decode-a"
role = "decode"
[[nodes]]
name = "decode-b"
role = "decode"
backend = "modelled:{stuck}"
settings = {{ step_deadline_s = 0.2 }}
[[nodes]]
name = "gateway-0"
role = "gateway"
"""
STUCK = Profile(
    model="toy",
    fingerprint="f" * 32,
    threads=1,
    backend="numpy",
    machine="one that hangs",
    prefill=(PrefillTime(8, 0, 0.008), PrefillTime(16, 0, 0.016)),
    decode=tuple(StepTime(batch, 8 * batch, 1e5 + batch) for batch in (1, 2, 4, 8)),
)
"""An engine whose first step takes a day."""


def config_text(shm: Path, root: Path, port: int) -> str:
    """A cluster for the units below `root`; decode-b is one that hangs."""
    stuck = root / "etc/mooncake-zmq/stuck.json"
    stuck.write_bytes(msgspec.json.encode(STUCK))
    return CONFIG.format(shm=shm, stuck=stuck, port=port, control=free_port(), data=free_port())


def settings(root: Path, unit: str) -> dict[str, list[str]]:
    """[Service] of a template under `root` with its drop-ins, which come later and so win; lists add up."""
    template = f"{unit.partition('@')[0]}@.service"
    drop_ins = [path for place in ("mooncake-.service.d", f"{template}.d") for path in (root / UNITS / place).glob("*.conf")]
    found: dict[str, list[str]] = {}
    for path in (root / UNITS / template, *sorted(drop_ins, key=lambda path: path.name)):
        for key, value in _assignments(path, "Service"):
            found[key] = [*found.get(key, []), value] if key in LISTS and value else [value]
    return found


def _assignments(path: Path, wanted: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in map(str.strip, path.read_text().splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#") and section == wanted:
            key, _, value = line.partition("=")
            yield key.strip(), value.strip()


class Service:
    """One unit of `root`: every absolute path in its files lies below that."""

    def __init__(self, root: Path, unit: str) -> None:
        self.root, self.unit = root, unit
        self.said: list[str] = []
        """Every assignment that the process told its manager, in order."""
        self._settings = settings(root, unit)
        self._instance = unit.partition("@")[2].removesuffix(".service")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(root / f"{self._instance}.notify"))
        self._log = root / f"{self._instance}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self._environment(), preexec_fn=self._confine, stdin=subprocess.DEVNULL, stderr=log, cwd="/"
            )

    @property
    def command(self) -> list[str]:
        return [self._below(word) for word in shlex.split(self._expand(self._one("ExecStart")))]

    def told(self) -> str:
        return self._log.read_text()

    def listen(self) -> list[str]:
        """All that it has said so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.said += self._socket.recv(4096).decode().split("\n")
        return self.said

    def await_said(self, word: str, times: int = 1, *, from_now: bool = False) -> None:
        """Wait until it has said something that begins with `word` so often."""
        before = len(self.listen()) if from_now else 0
        self._await(lambda: sum(each.startswith(word) for each in self.listen()[before:]) >= times, 60, f"says {word}")

    def await_ready(self) -> None:
        self._await(lambda: "READY=1" in self.listen() or self.process.poll() is not None, 90, "is ready")
        assert self.process.poll() is None, self.told()

    def _await(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        try:
            eventually(condition, within_s, f"{self.unit} {what}")
        except AssertionError as error:
            error.add_note(f"it said {self.said} and logged {self.told()[-4000:]}")
            others = [log for log in sorted(self.root.glob("*.log")) if log != self._log]
            error.add_note("\n".join(f"{log.stem} logged {log.read_text()[-2000:]}" for log in others))
            states = collect_dumps(self.root / "run/mooncake-zmq", [log.stem for log in (*others, self._log)])
            error.add_note(f"they are {states}")
            raise

    def stop(self) -> None:
        """As systemd stops it."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """What its process ended with."""
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._socket.close()

    def _one(self, key: str) -> str:
        return self._settings[key][-1]

    def _expand(self, text: str) -> str:
        for specifier, value in {"%i": self._instance, "%C": "/var/cache", "%S": "/var/lib", "%t": "/run"}.items():
            text = text.replace(specifier, value)
        assert "%" not in text, f"a specifier that is not known here: {text}"
        return text

    def _below(self, word: str) -> str:
        return f"{self.root}{word}" if word.startswith("/") else word

    def _environment(self) -> dict[str, str]:
        assert self._one("Type") == "notify"
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.root / "var/lib/mooncake-zmq"), "PYTHONPATH": str(ROOT)}
        for assignment in shlex.split(" ".join(self._settings["Environment"])):
            name, _, value = assignment.partition("=")
            environment[name] = self._below(self._expand(value))
        for kind, above in (("Runtime", "run"), ("State", "var/lib"), ("Cache", "var/cache")):
            directory = self.root / above / self._one(f"{kind}Directory")
            directory.mkdir(mode=int(self._one(f"{kind}DirectoryMode"), 8), parents=True, exist_ok=True)
            environment[f"{kind.upper()}_DIRECTORY"] = str(directory)
        environment["NOTIFY_SOCKET"] = str(self.root / f"{self._instance}.notify")
        environment["WATCHDOG_USEC"] = str(int(self._one("WatchdogSec")) * 1_000_000 // HASTE)
        return environment

    def _confine(self) -> None:
        """What can be had without systemd; in the child, before its program begins."""
        libc = ctypes.CDLL(None)
        if self._one("NoNewPrivileges") == "yes":
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self._one("MemoryDenyWriteExecute") == "yes":
            libc.prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)  # since Linux 6.3; earlier ones say no
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(int(self._one("LimitNOFILE")), most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.umask(int(self._one("UMask"), 8))


@contextlib.contextmanager
def running(root: Path, units: Sequence[str]) -> Iterator[dict[str, Service]]:
    """Those units, ready, by name of their node; what still runs at the end is killed."""
    services: dict[str, Service] = {}
    try:
        for unit in units:
            service = Service(root, unit)
            services[service._instance] = service
        for service in services.values():
            service.await_ready()
        yield services
    finally:
        for service in services.values():
            service.close()
