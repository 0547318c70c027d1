"""Gives one input to one decoder, and finds unstated errors, too much time and too much memory."""

import hashlib
import os
import re
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

MAX_CPU_S = 0.5
"""The CPU time for an input of a few KiB, exceeded three times in a row, so that other work in the process is no finding."""
MAX_HEEDED_CHARS = 200
MAX_GROWTH_BYTES = 64 << 20
"""The memory that a process may hold at any time beyond what it held before the input."""

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A directory for files that are not to wear out a disk; None: the system's directory for temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder of bytes from outside. `refusals`: the errors that it may raise on them."""

    name: str
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = ()
    seeds: Callable[[], Sequence[bytes]] = field(default=lambda: (b"",))
    max_bytes: int = 4096
    """The size of an input."""
    quick: bool = True
    """Whether it mostly takes below a tenth of a millisecond."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that broke a rule. `where` and `what` are the same for all inputs that show one bug."""

    decoder: str
    what: str
    where: str
    raw: bytes

    @property
    def key(self) -> tuple[str, str, str]:
        return self.decoder, self.what, self.where

    def save(self, directory: Path) -> Path:
        """Write the input to a file of its own."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.decoder}-{hashlib.sha256(self.raw).hexdigest()[:12]}"
        path.write_bytes(self.raw)
        return path

    def __str__(self) -> str:
        return f"{self.decoder}: {self.what} at {self.where}, {len(self.raw)} bytes"


def examine(decoder: Decoder, raw: bytes, heed: Callable[[str], None] = lambda result: None) -> Finding | None:
    """Return what is wrong with how `decoder` reads `raw`, if anything is. `heed` is called with the result or the refusal: for
    a decoder in C that is all there is to see."""
    before, began_s = _Memory.before_input(), time.process_time()
    try:
        heed(type(decoder.read(raw)).__name__)
    except decoder.refusals as refusal:
        heed(str(refusal)[:MAX_HEEDED_CHARS])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # any other error is a finding
        return Finding(decoder.name, type(error).__name__, _origin(error), raw)
    took_s = time.process_time() - began_s
    if (grown := before.grown_bytes()) > MAX_GROWTH_BYTES:
        return Finding(decoder.name, f"more than {MAX_GROWTH_BYTES >> 20} MiB", f"{grown >> 26 << 6} MiB", raw)
    if took_s > MAX_CPU_S and min(_cpu_s(decoder, raw) for _ in range(2)) > MAX_CPU_S:
        return Finding(decoder.name, f"more than {MAX_CPU_S:g} s", "its CPU time", raw)
    return None


def _cpu_s(decoder: Decoder, raw: bytes) -> float:
    began_s = time.process_time()
    with suppress(*decoder.refusals):
        decoder.read(raw)
    return time.process_time() - began_s


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory that the process held before an input, and its peak by then, which is reset there where that is permitted."""

    resident_bytes: int
    peak_bytes: int

    @classmethod
    def before_input(cls) -> "_Memory":
        began_anew = _begin_peak()
        resident_bytes = _resident_bytes()
        return cls(resident_bytes, resident_bytes if began_anew else _peak_bytes())

    def grown_bytes(self) -> int:
        """Return the growth since then, at its peak."""
        if _lifetime_peak_bytes() - self.resident_bytes <= MAX_GROWTH_BYTES:  # all that most inputs cost: it is never below
            return 0
        peak_bytes = _peak_bytes()
        return (peak_bytes if peak_bytes > self.peak_bytes else _resident_bytes()) - self.resident_bytes


def _begin_peak() -> bool:
    """Reset the peak to what is resident now. False where that is not permitted."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return True


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _peak_bytes() -> int:
    with open("/proc/self/status", "rb", buffering=0) as file:
        found = _PEAK.search(file.read())
    return int(found[1]) << 10 if found else _lifetime_peak_bytes()


def _lifetime_peak_bytes() -> int:
    """Return the process's peak, also from before it ran this program."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def _origin(error: BaseException) -> str:
    """Return the innermost line of the package's own code, or else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "mooncake_zmq" in each.filename and "/fuzz/examination.py" not in each.filename]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def mutations(seeds: Sequence[bytes], random: Random, count: int, max_bytes: int) -> Iterator[bytes]:
    """Yield the seeds, then `count` inputs mutated from them blindly: cheap enough for a test, and without a guide."""
    yield from seeds
    for _ in range(count):
        raw = bytearray(random.choice(seeds))
        for _ in range(random.choice((1, 1, 2, 4))):
            raw = _mutated(raw, random, seeds)
        yield bytes(raw[:max_bytes])


_ODD = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc1",
    b"\xcf" + b"\xff" * 8,
    b"\xdd\xff\xff\xff\xff",
    b"\n",
    b'"',
    b"-1",
    b"1e999",
    b"[" * 64,
)


def _mutated(raw: bytearray, random: Random, seeds: Sequence[bytes]) -> bytearray:
    at = random.randrange(len(raw) + 1)
    to = min(len(raw), at + random.choice((1, 1, 2, 4, 16)))
    match random.randrange(6):
        case 0 if raw:
            raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        case 1:
            raw[at:to] = random.choice(_ODD)
        case 2:
            raw[at:at] = random.choice(_ODD)
        case 3:
            del raw[at:to]
        case 4:
            raw[at:at] = raw[at:to] * random.choice((1, 2, 8))
        case _:
            raw[at:] = random.choice(seeds)[at:]
    return raw
