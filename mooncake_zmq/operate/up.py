"""Starts every node of a deployment on this machine, restarts those that crash, and stops all of them, leaving only logs."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mooncake_zmq.config.checks import check_local_reads, check_open
from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.config.warnings import is_tls, warnings
from mooncake_zmq.core.roles import ENGINE_ROLES, Role
from mooncake_zmq.gateway.http.tls import tls_files_of, trusting
from mooncake_zmq.operate.compilation import Compilation
from mooncake_zmq.operate.first_start import NodeStart, Process, start_together
from mooncake_zmq.runtime.lifecycle import PARENT_VARIABLE, follow_parent, make_private
from mooncake_zmq.runtime.listening import PortInUse, claim
from mooncake_zmq.runtime.mistakes import MISTAKES
from mooncake_zmq.runtime.process import BAD_INPUT
from mooncake_zmq.runtime.vllm_server import check_python, cpu_shares, server_command
from mooncake_zmq.telemetry import log_file
from mooncake_zmq.transfer.own_files import make_own_directory, open_own, own_files
from mooncake_zmq.transfer.process_lock import ProcessLock, holder, is_alive
from mooncake_zmq.transfer.segment_file import FILE_PREFIX, sweep
from mooncake_zmq.transfer.sockets import IPC_SUFFIX

LOCK_NAME = "up"
COMPILE_LOG = "compile.log"
POLL_S = 0.1
START_TIMEOUT_S = 120.0
VLLM_START_TIMEOUT_S = 1800.0
"""The start limit with vLLMs, which load weights and capture graphs on GPUs."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STEADY_S = 30.0
"""The run time after which a child's backoff starts from the beginning."""
TAIL_LINES = 15
RAM_LIMIT_BYTES = 10 << 30

Scenario = Callable[["Up"], int]
"""A function that runs beside a started cluster in its own thread and returns the exit code."""


class StartFailed(Exception):
    """Raised when the cluster did not start; the message is the reason."""


@dataclass(slots=True)
class _Child:
    node: NodeSettings
    log: Path
    process: Process | None = None
    wanted: bool = True
    crashes: int = 0
    started_at: float = 0.0
    start_at: float = 0.0
    starts: int = 0
    server: tuple[str, ...] = ()
    """The command line of a vLLM, if this is one and not the node beside it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment beside those of all children."""

    @property
    def name(self) -> str:
        return f"{self.node.name}.server" if self.server else self.node.name


class Up:
    """One cluster of child processes. Only the main thread starts children, as their death signal depends on the thread."""

    def __init__(
        self,
        loaded: Loaded,
        path: str,
        model: str | None,
        assignments: Sequence[str],
        *,
        vllm_python: str | None = None,
        compiles: bool = False,
    ) -> None:
        """Create the cluster; `vllm_python` is the Python of an environment with vLLM, which also starts each vllm node's
        server here. `compiles`: once it serves, compile in the background what the nodes run as Python."""
        self.loaded, self.config = loaded, loaded.config
        self._vllm_python = vllm_python
        self._start_timeout_s = START_TIMEOUT_S if vllm_python is None else VLLM_START_TIMEOUT_S
        self.console = Console(highlight=False)
        self.runtime_dir = Path(self.config.cluster.runtime_dir)
        self._compilation = Compilation(self.runtime_dir / "logs" / COMPILE_LOG, self.say) if compiles else None
        self._arguments = ["--config", path]
        for assignment in assignments:
            self._arguments += ["--set", assignment]
        if model is not None:
            self._arguments += ["--model", model]
        self._children: dict[str, _Child] = {}
        self._stops = 0
        self._wake = threading.Event()
        self._result: int | None = None

    @property
    def url(self) -> str:
        """The URL of the first gateway."""
        settings = self.loaded.section(self.config.of_role("gateway")[0])
        host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
        return f"{'https' if is_tls(settings) else 'http'}://{host}:{settings.http_port}"

    def run(self, scenario: Scenario | None = None) -> int:
        """Start, serve until a signal or the end of `scenario`, and stop; return the exit code."""
        try:
            with ExitStack() as stack:
                self._claim(stack)
                self._prepare_model()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as of `nohup`
                        signal.signal(number, self._on_signal)
                try:
                    self._start()
                    return self._serve(scenario)
                finally:
                    self._stop()
        except MISTAKES as mistake:
            sys.stderr.write(f"mooncake-zmq: {mistake}\n")
            return BAD_INPUT
        except StartFailed as failed:
            sys.stderr.write(f"mooncake-zmq: {failed}\n")
            return 1
        except KeyboardInterrupt:
            return 130

    # --- for scenarios, from any thread

    def hold(self, name: str) -> None:
        """Stop a node with SIGTERM and keep it down until `release`."""
        child = self._children[name]
        child.wanted = False
        signalled: Process | None = None
        while (process := child.process) is not None:
            if process is not signalled:  # the main thread may have restarted it meanwhile
                process.send_signal(signal.SIGTERM)
                signalled = process
            time.sleep(POLL_S / 2)

    def release(self, name: str) -> None:
        """Start a held node again."""
        self._children[name].wanted = True

    def signal(self, name: str, number: signal.Signals) -> int | None:
        """Send a signal to a node; return the pid it had, if it ran."""
        process = self._children[name].process
        if process is None:
            return None
        process.send_signal(number)
        return process.pid

    def pid(self, name: str) -> int | None:
        """Return the pid of a node's process, if it runs."""
        process = self._children[name].process
        return process.pid if process else None

    def first_model(self) -> str:
        """Return the name of the first of several models; empty if the gateway does not say."""
        return str((self.health() or {}).get("model", "")).split(", ")[0]

    def health(self) -> dict[str, Any] | None:
        """Return the first gateway's health; None unless it answers 200."""
        settings = self.loaded.section(self.config.of_role("gateway")[0])
        files = tls_files_of(settings.tls_certificate, settings.tls_key)
        place = settings.http_host, settings.http_port
        connection = http.client.HTTPConnection(*place, timeout=2)
        if files is not None:
            connection = http.client.HTTPSConnection(*place, timeout=2, context=trusting(files.certificate))
        with suppress(OSError, http.client.HTTPException, ValueError):
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                detail: dict[str, Any] = json.loads(response.read())
                return detail if response.status == 200 else None
            finally:
                connection.close()
        return None

    # --- start

    def _claim(self, stack: ExitStack) -> None:
        """Find all mistakes that can be found before anything is started."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        make_private(self.runtime_dir)
        stack.callback(ProcessLock.acquire(self.runtime_dir, LOCK_NAME).release)
        engines: tuple[Role, ...] = ("vllm",) if self.config.of_role("vllm") else ENGINE_ROLES
        needed: tuple[Role, ...] = ("conductor", *engines, "gateway")
        for role in needed:
            if not self.config.of_role(role):
                raise ConfigError(f"{self.loaded.path}: there is no {role}: nothing can be served")
        if self._vllm_python is not None:
            check_python(self._vllm_python, self.config)
        check_open(self.loaded, self.config.nodes)
        check_local_reads(self.loaded, self.config.nodes)
        for node in self.config.nodes:
            check_free(self.runtime_dir, node.name)
        for node in self.config.of_role("gateway"):
            settings = self.loaded.section(node)
            try:
                claim(settings.http_host, settings.http_port, share=settings.reuse_port).close()
            except PortInUse as error:
                raise PortInUse(f"{error}; stop what listens there, or --set gateway.http_port=PORT") from error
        self._sweep()

    def _prepare_model(self) -> None:
        if (
            self.config.model.engine == "vllm"
            or self.config.model.card
            and not any(node.computes for node in self.config.nodes)
        ):
            return
        from mooncake_zmq.engine.prepare import prepare, remove_former

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("model", total=1.0)

            def show(what: str, share: float) -> None:
                if not self.console.is_terminal and share < 1.0 and progress.tasks[task].description != what:
                    self.say(what)  # a log shows no bar
                progress.update(task, description=what, completed=share)

            began_at = time.monotonic()
            model = self.config.model
            path = prepare(model.path, model.cache_dir, show, backend=self.config.backend, codec=model.kv_codec)
        took = time.monotonic() - began_at
        self.say(f"model {self.config.model.path}: {path}" + (f" (prepared in {took:.0f} s)" if took > 1 else ""))
        for former in remove_former(path):
            self.say(f"removed {former}, which an earlier version had prepared")

    def _start(self) -> None:
        logs = self.runtime_dir / "logs"
        make_own_directory(logs)
        for warning in warnings(self.loaded):
            self.say(f"[yellow]note:[/] {warning}")
        for child in (*self._servers(logs), *(_Child(node, logs / f"{node.name}.log") for node in self.config.nodes)):
            self._children[child.name] = child
            if _size(child.log):  # the log of the previous cluster
                os.replace(child.log, log_file.older(child.log))
        self._spawn_all()
        self.say(f"started {len(self._children)} processes; logs in {logs}")
        deadline = time.monotonic() + self._start_timeout_s
        while not self._is_complete():
            self._look_after_children(starting=True)
            if self._stops:
                return
            if time.monotonic() > deadline:
                raise StartFailed(f"the gateway is not healthy after {self._start_timeout_s:.0f} s; see {logs}")
            self._wake.wait(POLL_S)

    def _servers(self, logs: Path) -> list[_Child]:
        """Return the vLLM servers to start, which come first, as their nodes wait for them."""
        if self._vllm_python is None:
            return []
        children, nodes = [], self.config.of_role("vllm")
        shares = cpu_shares([self.loaded.section(node) for node in nodes])
        for node, variables in zip(nodes, shares, strict=True):
            config, section = self.loaded.of(node).config, self.loaded.section(node)
            command = server_command(self._vllm_python, config, section, node.host, servers=len(nodes))
            children.append(_Child(node, logs / f"{node.name}.server.log", server=tuple(command), variables=variables))
        return children

    def _is_complete(self) -> bool:
        """Return whether the gateway is healthy and every engine is connected."""
        detail = self.health()
        if detail is None:
            return False
        if "peers" not in detail:  # admins' API keys only; a gateway is healthy once its conductor has all nodes
            return True
        there = {name for names in detail["peers"].values() for name in names}
        return all(node.name in there for node in self.config.of_role("conductor", "vllm", *ENGINE_ROLES))

    def _spawn_all(self) -> None:
        """Start every child for the first time: vLLMs one by one, and all nodes from one process where that is possible."""
        nodes = [child for child in self._children.values() if not child.server]
        for child in self._children.values():
            if child.server:
                self._spawn(child)
        starts = [NodeStart(child.node.role, self._command(child), child.log) for child in nodes]
        started = start_together(starts, self._environment())
        for child, process in zip(nodes, started or (), strict=False):
            self._note_start(child, process)
        for child in () if started else nodes:
            self._spawn(child)

    def _command(self, child: _Child) -> tuple[str, ...]:
        """Return what follows `python -m mooncake_zmq` for a node."""
        return child.node.role, *self._arguments, "--node", child.node.name

    def _environment(self) -> dict[str, str]:
        """Return the environment of the children, which import nothing from the directory in which this process was started."""
        return {**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}

    def _spawn(self, child: _Child) -> None:
        environment = {**self._environment(), log_file.VARIABLE: str(child.log), **child.variables}
        own = [sys.executable, "-m", "mooncake_zmq", *self._command(child)]
        with open(open_own(child.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
            # A session of its own: Ctrl-C reaches only this process, which then drains the children in order. And Linux shares
            # cores by session: in one session, the threads of engines delayed stores by seconds.
            process = subprocess.Popen(
                child.server or own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=follow_parent if child.server else None,
            )
        self._note_start(child, process)

    def _note_start(self, child: _Child, process: Process) -> None:
        child.process = process
        child.started_at = time.monotonic()
        child.starts += 1

    # --- serve

    def _serve(self, scenario: Scenario | None) -> int:
        if self._stops:
            return 0
        self._greet()
        if self._compilation is not None:
            self._compilation.begin()
        if scenario is not None:
            threading.Thread(target=self._play, args=(scenario,), daemon=True).start()
        while not self._stops and self._result is None:
            self._look_after_children(starting=False)
            if self._compilation is not None:
                self._compilation.look()
            self._wake.wait(POLL_S)
        return self._result if self._result is not None else 130 if scenario else 0

    def _play(self, scenario: Scenario) -> None:
        result = 1
        try:
            result = scenario(self)
        finally:
            self._result = result
            self._wake.set()

    def _greet(self) -> None:
        detail = self.health() or {}
        used = self.ram_bytes()
        verdict = "under" if used < RAM_LIMIT_BYTES else "[red]over[/]"
        named = f'"model": "{self.first_model() or "NAME"}", ' if self.config.models else ""
        question = f'{{{named}"messages": [{{"role": "user", "content": "What is a KV cache?"}}], "max_tokens": 64}}'
        model = f"  (model {detail['model']})" if "model" in detail else ""  # with API keys /health does not name it
        keys = self.loaded.section(self.config.of_role("gateway")[0]).api_keys
        header = " -H 'authorization: Bearer YOUR_API_KEY'" if keys else ""
        self.say(f"[bold green]ready[/]: {self.url}/v1{model}")
        self.say(f"try: curl -s {self.url}/v1/chat/completions -H 'content-type: application/json'{header} -d '{question}'")
        self.say(f"RAM in use: {used / (1 << 30):.2f} GiB, /dev/shm included ({verdict} {RAM_LIMIT_BYTES >> 30} GiB)")
        self.say("Ctrl-C stops")

    def _look_after_children(self, *, starting: bool) -> None:
        """Reap children that ended, report them, and start them again."""
        now = time.monotonic()
        for child in self._children.values():
            if child.process is not None and (code := child.process.poll()) is not None:
                _kill_leftovers(child)
                child.process = None
                if child.wanted:
                    self._explain_end(child, code, now, starting=starting)
            if child.process is None and child.wanted and now >= child.start_at:
                try:
                    self._spawn(child)
                except OSError as error:  # no memory, say, or no process: those that run go on
                    self._start_later(child, f"cannot be started: {error.strerror}", now)
            if child.server and _size(child.log) > log_file.MAX_BYTES:
                _cut(child.log)

    def _explain_end(self, child: _Child, code: int, now: float, *, starting: bool) -> None:
        name = child.name
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        late = child.starts == 1 and now - child.started_at < START_TIMEOUT_S  # no gateway waits for a cache-node
        if code == BAD_INPUT and (starting or late):
            raise StartFailed(self._last_words(child))
        if now - child.started_at > STEADY_S:
            child.crashes = 0
        self._start_later(child, how, now)
        if code > 0:
            self.console.print(self._tail(child), markup=False, style="dim")
            if starting and child.crashes >= 3:
                raise StartFailed(f"{name} does not stay up; see {child.log}")

    def _start_later(self, child: _Child, why: str, now: float) -> None:
        delay_s = BACKOFF_S[min(child.crashes, len(BACKOFF_S) - 1)]
        child.crashes += 1
        child.start_at = now + delay_s
        self.say(f"[yellow]{child.name}[/] {why}; starting it again in {delay_s} s")

    def _tail(self, child: _Child) -> str:
        """Return the last lines of a log; of a vLLM's also the first that names an error, the cause of those after it."""
        lines = _lines(child.log)
        shown = lines[-TAIL_LINES:]
        cause = next((line for line in lines if "Error: " in line), "") if child.server else ""
        if cause and cause not in shown:
            shown = [cause, "...", *shown]
        return "\n".join(f"  {child.name} | {line}" for line in shown)

    def _last_words(self, child: _Child) -> str:
        lines = _lines(child.log)
        return lines[-1].removeprefix("mooncake-zmq: ") if lines else f"{child.node.name} gave no reason"

    # --- stop

    def _stop(self) -> None:
        """Stop all children: gateways first, as they wait for their requests, which need other nodes; vLLMs last."""
        if self._compilation is not None:
            self._compilation.stop()
        running = [child for child in self._children.values() if child.process is not None]
        if running and self._stops:
            self.say("draining; Ctrl-C again stops at once")
        limit_s = self.config.cluster.drain_timeout_s + 5
        gateways = [child for child in running if child.node.role == "gateway"]
        servers = [child for child in running if child.server]
        for group in (gateways, [child for child in running if child not in (*gateways, *servers)], servers):
            for child in group:
                _send(child, signal.SIGTERM)
            self._await_end(group, limit_s)
        self._sweep()
        if self._children:
            self.say("stopped")

    def _await_end(self, group: list[_Child], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        hurried_at: float | None = None
        while any(child.process is not None and child.process.poll() is None for child in group):
            now = time.monotonic()
            if hurried_at is None and (self._stops > 1 or now > deadline):
                hurried_at = now
                for child in group:
                    _send(child, signal.SIGTERM)  # the second SIGTERM: stop at once
            elif hurried_at is not None and now > hurried_at + 5:
                for child in group:
                    _send(child, signal.SIGKILL)
            time.sleep(POLL_S / 4)
        for child in group:
            _kill_leftovers(child)
            child.process = None

    def _sweep(self) -> None:
        """Remove what dead processes left: segments, sockets, dumps. Logs stay, and locks, which record former
        incarnations."""
        cluster = self.config.cluster
        sweep(cluster.shm_dir, cluster.name, lambda name, incarnation: is_alive(self.runtime_dir, name, incarnation))
        for node in self.config.nodes:
            if holder(self.runtime_dir, node.name) is not None:
                continue  # somebody started it by hand
            sockets = [f"{kind}{beside}" for kind in (".ipc", ".data.ipc") for beside in ("", IPC_SUFFIX)]
            for suffix in (*sockets, ".dump.json", ".dump.tmp"):
                (self.runtime_dir / f"{node.name}{suffix}").unlink(missing_ok=True)
            for what in ("ask", "answer"):
                for path in self.runtime_dir.glob(f"{node.name}.{what}.*"):
                    path.unlink(missing_ok=True)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stops += 1
        self._wake.set()

    # --- output

    def say(self, text: str) -> None:
        """Print one line for the user."""
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", soft_wrap=True)

    def ram_bytes(self) -> int:
        """Return the bytes that this cluster has in RAM: its processes' share of private and file memory, and its segments."""
        processes = [child.process for child in self._children.values()]
        pids = [process.pid for process in processes if process is not None]
        segments = own_files(self.config.cluster.shm_dir, f"{FILE_PREFIX}={self.config.cluster.name}=")
        return sum(map(_private_and_file_bytes, (*pids, os.getpid()))) + sum(map(_allocated_bytes, segments))


def check_free(runtime_dir: str | Path, name: str = LOCK_NAME) -> None:
    """Raise ConfigError if a node of this name, or a whole cluster, runs in this directory."""
    if (pid := holder(runtime_dir, name)) is not None:
        raise ConfigError(f"{name} is already running as pid {pid} in {runtime_dir}")


def _lines(log: Path) -> list[str]:
    """Return the lines of a log; none if somebody removed it."""
    with suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return []


def _kill_leftovers(child: _Child) -> None:
    """Kill what a vLLM that ended left behind: its engine is a process of its own, which may notice late or never."""
    if child.server and child.process is not None:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)


def _send(child: _Child, number: signal.Signals) -> None:
    if child.process is not None:
        child.process.send_signal(number)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _cut(log: Path) -> None:
    """Move a log's lines to its older file and empty it, while a foreign writer keeps its descriptor.

    The writer appends, so it continues at the start. Lines written between the copy and the cut are lost; the project's own
    nodes rotate their logs themselves.
    """
    older = log_file.older(log)
    with suppress(OSError):  # a full disk, say: then the older lines are lost
        older.unlink(missing_ok=True)
        shutil.copyfile(log, older)
    with suppress(FileNotFoundError):
        os.truncate(log, 0)


def _allocated_bytes(path: Path) -> int:
    with suppress(OSError):  # its owner may have ended
        return path.stat().st_blocks * 512
    return 0


def _private_and_file_bytes(pid: int) -> int:
    """Return the private and file memory of a process, proportionally: a page that n processes share counts 1/n in each.
    Shared memory is counted by its files instead."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_File:")):
                total += int(line.split()[1]) * 1024
    return total
