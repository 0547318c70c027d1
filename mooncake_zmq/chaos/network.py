"""The hosts of a run: network namespaces on a bridge whose links can be cut, or, where none are permitted, loopback.

Everything is made inside a namespace of the run's own, so that runs do not disturb each other and nothing outlives one.
"""

import functools
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mooncake_zmq.chaos.plan import Kind

SOURCES = 4
INSIDE_VARIABLE = "MOONCAKE_ZMQ_CHAOS_INSIDE"
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_UNUSED_ADDRESS = "02:00:00:00:00:00"
"""A link address that no interface has: frames sent to it are lost silently, as behind a broken switch."""


class Network(Protocol):
    """The network between hosts, and the faults that it can have."""

    name: str
    impossible: dict[Kind, str]
    """The kinds of faults that are impossible here, and why."""
    sources: tuple[str, ...]
    """The local addresses that clients may connect from."""

    def address(self, written: str) -> str:
        """Return the address to use in place of one that the deployment names."""

    def command(self, host: str) -> list[str]:
        """Return the words to put before a command that is to run on `host`."""

    def mount(self, directory: Path, size_bytes: int) -> bool:
        """Make `directory` a file system of its own, of this size; False where that is not permitted."""

    def cut(self, sender: str, receiver: str, *, cut: bool) -> None:
        """Begin or stop losing the frames that the host `sender` sends to the host `receiver`."""

    def delay(self, host: str, seconds: float) -> None:
        """Delay the frames that `host` sends; 0: no longer."""

    def close(self) -> None: ...


def enter() -> None:
    """Run this process's command line again within namespaces of its own, if that is permitted; return only if not."""
    if INSIDE_VARIABLE in os.environ or shutil.which("unshare") is None or shutil.which("ip") is None:
        return
    for user in ((), ("--user", "--map-root-user")):
        inside = ["unshare", *user, *_NAMESPACES]
        probe = subprocess.run([*inside, "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
        if probe.returncode == 0:
            environment = {**os.environ, INSIDE_VARIABLE: "1"}
            os.execvpe("unshare", [*inside, sys.executable, "-m", "mooncake_zmq", *sys.argv[1:]], environment)


def open_network(hosts: dict[str, str]) -> Network:
    """Return the best network that is permitted. `hosts`: the address of each, by name."""
    if INSIDE_VARIABLE in os.environ:
        return Namespaces(hosts)
    return Loopback(hosts)


class Loopback:
    """A network with all hosts on this machine's loopback, each with an address of its own; nothing can be cut."""

    name = "loopback, where no link can be cut"

    def __init__(self, hosts: dict[str, str]) -> None:
        why = "needs network namespaces"
        self.impossible = dict.fromkeys((Kind.PARTITION, Kind.ONE_WAY, Kind.DELAY), why)
        run = os.getpid()
        self.sources = tuple(f"127.0.0.{number}" for number in range(1, SOURCES + 1))
        self._addresses = {
            address: f"127.{1 + (run >> 8) % 250}.{run % 256}.{number}" for number, address in enumerate(hosts.values(), 2)
        }

    def address(self, written: str) -> str:
        return self._addresses[written]

    def command(self, host: str) -> list[str]:
        return []

    def mount(self, directory: Path, size_bytes: int) -> bool:
        return False

    def cut(self, sender: str, receiver: str, *, cut: bool) -> None:
        raise NotImplementedError

    def delay(self, host: str, seconds: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


class Namespaces:
    """A network namespace for each host, plugged into a bridge in the run's namespace, where the clients are."""

    name = "network namespaces"

    def __init__(self, hosts: dict[str, str]) -> None:
        self._addresses = hosts
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._mounted: list[Path] = []
        network = next(iter(hosts.values())).rpartition(".")[0]
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("addr", "add", f"{network}.1/24", "dev", "bridge")
        self.sources = tuple(f"{network}.{200 + number}" for number in range(SOURCES))
        for address in self.sources:
            _ip("addr", "add", f"{address}/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")
        for number, (host, address) in enumerate(hosts.items()):
            self._plug_in(host, address, f"host{number}")
        self.impossible: dict[Kind, str] = {}
        if not self._can_delay(next(iter(hosts))):
            self.impossible[Kind.DELAY] = "this kernel has no netem"

    def _plug_in(self, host: str, address: str, port: str) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._holders[host] = holder
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            if holder.poll() is not None:
                raise OSError(f"no network namespace for {host}")
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _ip("link", "set", port, "master", "bridge", "up")
        self._on(host, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self._on(host, "ip", "link", "set", "eth0", "up")
        self._on(host, "ip", "link", "set", "lo", "up")

    def address(self, written: str) -> str:
        return written

    def command(self, host: str) -> list[str]:
        return ["nsenter", "--target", str(self._holders[host].pid), "--net", "--"]

    def mount(self, directory: Path, size_bytes: int) -> bool:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "none", str(directory)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            return False
        self._mounted.append(directory)
        return True

    def cut(self, sender: str, receiver: str, *, cut: bool) -> None:
        place = [self._addresses[receiver], "dev", "eth0"]
        if cut:
            self._on(sender, "ip", "neigh", "replace", *place, "lladdr", _UNUSED_ADDRESS, "nud", "permanent")
        else:
            with suppress(OSError):  # of two faults at once, the other has mended it
                self._on(sender, "ip", "neigh", "del", *place)

    def delay(self, host: str, seconds: float) -> None:
        if seconds:
            spread = f"{seconds / 3:.3f}s"
            self._on(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{seconds:.3f}s", spread)
        else:
            self._on(host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        while self._mounted:
            _run("umount", str(self._mounted.pop()))
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        self._holders.clear()

    def _can_delay(self, host: str) -> bool:
        if shutil.which("tc") is None:
            return False
        try:
            self.delay(host, 0.001)
        except OSError:
            return False
        self.delay(host, 0)
        return True

    def _on(self, host: str, *command: str) -> None:
        _run(*self.command(host), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


_ip = functools.partial(_run, "ip")
