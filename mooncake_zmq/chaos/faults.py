"""Carries out one fault on a running cluster, and undoes it."""

import asyncio
import errno
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from mooncake_zmq.chaos import forged
from mooncake_zmq.chaos.cluster import Cluster
from mooncake_zmq.chaos.damage import flip_blocks, flip_files, toy_layout
from mooncake_zmq.chaos.history import Done, History
from mooncake_zmq.chaos.plan import Fault, Kind
from mooncake_zmq.core.keys import KeysError

BALLAST = "ballast"
BALLAST_PIECE_BYTES = 1 << 20
WHOLE_TIMEOUT_S = 120.0
"""The time after an outage within which the cluster must be whole again."""
_POLL_S = 0.05


class Saboteur:
    """Carries out faults on one cluster; the history holds each fault and its result."""

    def __init__(self, cluster: Cluster, history: History, seed: int) -> None:
        self.problems: list[str] = []
        self.strangers_refused = 0
        self._rotating = asyncio.Lock()
        self._cluster = cluster
        self._history = history
        self._random = Random(f"sabotage {seed}")

    async def commit(self, fault: Fault) -> Done:
        """Carry out a fault; return once it is over and, after an outage, the cluster whole again."""
        entry = self._history.begin(fault, self._disturbed(fault), time.monotonic())
        await self._carry_out(fault, entry)
        if fault.kind.is_outage and not await self._cluster.until_whole(WHOLE_TIMEOUT_S) and not self._cluster.stopping:
            self.problems.append(f"the cluster was not whole {WHOLE_TIMEOUT_S:.0f} s after: {fault}")
        entry.ended_at = time.monotonic()
        return entry

    def _disturbed(self, fault: Fault) -> tuple[str, ...]:
        match fault.kind:
            case Kind.PARTITION | Kind.ONE_WAY:
                return ()  # the targets only select hosts: their nodes keep running
            case Kind.REBOOT | Kind.LOST_CLOCK:
                return tuple(self._cluster.of_host(self._cluster.host(fault.targets[0])))
        return fault.targets

    async def _carry_out(self, fault: Fault, entry: Done) -> None:
        cluster, host = self._cluster, self._cluster.host(fault.targets[0])
        match fault.kind:
            case Kind.KILL | Kind.POOLS | Kind.EVERYTHING:
                await self._kill(fault.targets, fault.duration_s)
            case Kind.FLAP:
                await self._flap(fault)
            case Kind.REBOOT:
                await self._kill(entry.disturbed, fault.duration_s, lambda: cluster.forget(host))
            case Kind.LOST_CLOCK:
                for clock_s in (fault.amount, 0.0):
                    cluster.dials(host).turn(clock_s=clock_s)
                    await self._kill(entry.disturbed, fault.duration_s, lambda: cluster.forget(host))
                    await cluster.until_whole(WHOLE_TIMEOUT_S)
            case Kind.STOP | Kind.TAKEOVER:
                await self._stop(fault)
            case Kind.DRAIN | Kind.ROLLING:
                for name in fault.targets:
                    await cluster.drain(name)
                    await cluster.until_whole(WHOLE_TIMEOUT_S)
            case Kind.ROTATE:
                await self._rotate(fault)
            case Kind.PARTITION | Kind.ONE_WAY:
                await self._cut(fault)
            case Kind.DELAY:
                cluster.network.delay(host, fault.amount)
                await asyncio.sleep(fault.duration_s)
                cluster.network.delay(host, 0)
            case Kind.DISK_FULL:
                await self._fill(fault, host)
            case Kind.DISK_FAIL:
                await self._turn(fault, host, disk_errno=errno.EIO)
            case Kind.CLOCK:
                for clock_s in (fault.amount, 0.0):
                    cluster.dials(host).turn(clock_s=clock_s)
                    await self._kill(fault.targets, 0.0)
                    await asyncio.sleep(fault.duration_s if clock_s else 0)
            case Kind.FLIP_DISK:
                directory = cluster.ssd_dir(host) / fault.targets[0]
                flipped = await asyncio.to_thread(flip_files, directory, int(fault.amount), self._random)
                self._note(entry, flipped, "bytes flipped")
            case Kind.FLIP_MEMORY:
                self._note(entry, self._flip_memory(fault), "blocks damaged")
            case Kind.FORGE:
                entry.what = await self._forge(fault)

    def _note(self, entry: Done, count: int, what: str) -> None:
        """Note how much a fault changed; one that found nothing to change was not done."""
        entry.what = f"{count} {what}"
        if not count:
            self._history.done.remove(entry)

    async def _kill(self, names: tuple[str, ...], away_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill nodes; return once their next incarnations run. `meanwhile`: what is done before they start."""
        before = {name: self._cluster.children[name].starts for name in names}
        for name in names:
            self._cluster.kill(name, away_s)
        meanwhile()
        while any(self._cluster.children[name].starts == starts for name, starts in before.items()):
            if self._cluster.stopping:
                return
            await asyncio.sleep(_POLL_S)

    async def _flap(self, fault: Fault) -> None:
        for number in range(int(fault.amount)):
            await self._kill(fault.targets, 0.0)
            if number % 2:
                await self._cluster.until_whole(WHOLE_TIMEOUT_S)
            await asyncio.sleep(fault.duration_s)

    async def _rotate(self, fault: Fault) -> None:
        """Rotate keys as the manual says: public keys everywhere, then the secret, then a restart; the former keys are deleted
        last."""
        cluster, keys = self._cluster, self._cluster.keys
        assert keys is not None
        async with self._rotating:  # a node has at most two keys
            for name in fault.targets:
                await asyncio.to_thread(keys.rotate, name)
                await cluster.drain(name)
                await cluster.until_whole(WHOLE_TIMEOUT_S)
            for name in fault.targets:
                await asyncio.to_thread(keys.drop, name)

    async def _stop(self, fault: Fault) -> None:
        for name in fault.targets:
            self._cluster.signal(name, signal.SIGSTOP)
        await asyncio.sleep(fault.duration_s)
        for name in fault.targets:
            self._cluster.signal(name, signal.SIGCONT)

    async def _cut(self, fault: Fault) -> None:
        hosts = [self._cluster.host(name) for name in fault.targets]
        ways = [(hosts[0], hosts[1])] + [(hosts[1], hosts[0])] * (fault.kind is Kind.PARTITION)
        for sender, receiver in ways:
            self._cluster.network.cut(sender, receiver, cut=True)
        await asyncio.sleep(fault.duration_s)
        for sender, receiver in ways:
            self._cluster.network.cut(sender, receiver, cut=False)

    async def _fill(self, fault: Fault, host: str) -> None:
        if not self._cluster.own_file_systems:
            await self._turn(fault, host, disk_errno=errno.ENOSPC)
            return
        ballast = self._cluster.ssd_dir(host) / f"{BALLAST}-{fault.at_s}"  # another file may still be there
        await asyncio.to_thread(_fill, ballast)
        await asyncio.sleep(fault.duration_s)
        ballast.unlink()

    async def _turn(self, fault: Fault, host: str, *, disk_errno: int) -> None:
        self._cluster.dials(host).turn(disk_errno=disk_errno)
        await asyncio.sleep(fault.duration_s)
        self._cluster.dials(host).turn(disk_errno=0)

    def _flip_memory(self, fault: Fault) -> int:
        name = fault.targets[0]
        directory, flipped = self._cluster.shm_dir(self._cluster.host(name)), 0
        layout = toy_layout(self._cluster.config.model.block_tokens)
        for segment in self._cluster.segments(self._cluster.host(name)):
            if f"={name}=" in segment:
                incarnation = int(segment.rpartition("=")[2])
                flipped += flip_blocks(directory / segment, incarnation, layout, int(fault.amount), self._random)
        return flipped

    async def _forge(self, fault: Fault) -> str:
        name = fault.targets[0]
        address, port = self._cluster.control(name)
        forge = partial(forged.frames, self._random, list(self._cluster.children))
        sent = await asyncio.to_thread(forged.send_in_clear, address, port, list(forge(int(fault.amount))), self._random)
        done = f"{sent} frames sent in clear"
        if (keys := self._cluster.keys) is None:
            return done
        at = partial(forged.send_by_key, name, f"tcp://{address}:{port}")
        refused = await self._forge_as_strangers(
            name, [partial(at, list(forge(int(fault.amount))), each) for each in keys.of_strangers()]
        )
        thief = self._random.choice([each for each in self._cluster.children if each != name])
        try:
            stolen = keys.of(thief)
        except KeysError:  # it is just being rotated
            return f"{done}; strangers refused {refused} times"
        met = await asyncio.to_thread(at, list(forge(int(fault.amount))), stolen)
        return (
            f"{done}; strangers refused {refused} times; {int(fault.amount) * bool(met.admitted)} frames by the key of {thief}"
        )

    async def _forge_as_strangers(self, name: str, sendings: list[Callable[[], forged.Met]]) -> int:
        """Send as strangers; return how often they were refused, which the node must have counted unless it ended meanwhile."""
        began, before = time.monotonic(), await self._cluster.dump(name)
        met = [await asyncio.to_thread(sending) for sending in sendings]
        after = await self._cluster.dump(name)
        if any(each.admitted for each in met):
            self.problems.append(f"{name} let in a stranger")
        refused = sum(each.refused for each in met)
        self.strangers_refused += refused
        if before and after and before["incarnation"] == after["incarnation"]:
            counted = after["parts"]["connections"]["refused"] - before["parts"]["connections"]["refused"]
            was_up = not self._history.disturbed(name, began, time.monotonic())
            self.problems += unmet(name, met, counted, was_up=was_up)
        return refused


def unmet(name: str, met: Sequence[forged.Met], counted: int, *, was_up: bool) -> Iterator[str]:
    """Return what is wrong with the admission of strangers by one incarnation of a node. `counted`: its refusals; `was_up`: it
    was not disturbed."""
    refused = sum(each.refused for each in met)
    if counted < refused:
        yield f"{name} refused strangers {refused} times and counted {counted}"
    if was_up and (unanswered := sum(not (each.admitted or each.refused) for each in met)):
        yield f"{name} neither let in nor refused {unanswered} of {len(met)} strangers"


def _fill(path: Path) -> None:
    """Fill a file system until not one byte more fits."""
    piece = bytes(BALLAST_PIECE_BYTES)
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            if file.write(piece) < len(piece):
                piece = bytes(1)
