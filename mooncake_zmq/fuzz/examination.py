"""One input given to one decoder, and what may not come of it: another error than the stated one, time, or memory."""

import hashlib
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

MAX_CPU_S = 0.5
"""For an input of a few KiB; thrice, so that what else goes on in the process is no finding."""
MAX_HEEDED_CHARS = 200
MAX_GROWTH_BYTES = 64 << 20
"""By which an input may raise the process's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What reads bytes that somebody else wrote. `refusals`: the errors that it may raise on them."""

    name: str
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = ()
    seeds: Callable[[], Sequence[bytes]] = field(default=lambda: (b"",))
    max_bytes: int = 4096
    """Of an input."""
    quick: bool = True
    """Below a tenth of a millisecond, mostly."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that did what none may. `where` and `what` are the same for all inputs that show one bug."""

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


def examine(decoder: Decoder, raw: bytes, heed: Callable[[str], None] = lambda told: None) -> Finding | None:
    """What is wrong with how `decoder` takes `raw`, if anything is. `heed` is told what became of a good one: of a decoder in C
    that is all there is to see."""
    peak_bytes, began_s = _peak_bytes(), time.process_time()
    try:
        heed(type(decoder.read(raw)).__name__)
    except decoder.refusals as refusal:
        heed(str(refusal)[:MAX_HEEDED_CHARS])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # any other is what we are here for
        return Finding(decoder.name, type(error).__name__, _origin(error), raw)
    took_s = time.process_time() - began_s
    if (grown := _peak_bytes() - peak_bytes) > MAX_GROWTH_BYTES:
        return Finding(decoder.name, f"more than {MAX_GROWTH_BYTES >> 20} MiB", f"{grown >> 26 << 6} MiB", raw)
    if took_s > MAX_CPU_S and min(_cpu_s(decoder, raw) for _ in range(2)) > MAX_CPU_S:
        return Finding(decoder.name, f"more than {MAX_CPU_S:g} s", "its CPU time", raw)
    return None


def _cpu_s(decoder: Decoder, raw: bytes) -> float:
    began_s = time.process_time()
    with suppress(*decoder.refusals):
        decoder.read(raw)
    return time.process_time() - began_s


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _origin(error: BaseException) -> str:
    """The innermost line of ours, or else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "mooncake_zmq" in each.filename and "/fuzz/examination.py" not in each.filename]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def mutations(seeds: Sequence[bytes], random: Random, count: int, max_bytes: int) -> Iterator[bytes]:
    """The seeds, then `count` inputs made of them, blindly: what a test can afford, and no guide is needed for."""
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
