"""A process that fuzzes one decoder by atheris, which sees what code an input reaches: `python -m mooncake_zmq.fuzz.guided`.

It tells of each finding in a line of JSON. libFuzzer ends the process, and tells how far it came in its own words. Nothing is
tidied up then: whoever starts it gives it a TMPDIR, and removes that.
"""

import importlib
import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil

MORE_MEMORY_BYTES = 1 << 30
"""Beyond what the process has when it begins: what asks for more is a finding instead of the machine's end."""
MAX_FINDINGS = 20
_QUOTED = re.compile(r"'.*'|\".*\"|0x\w+|\d+|, got .*", re.DOTALL)
"""Of an input, in an error: no two are alike."""
_FAR = re.compile(r"\d\d+")
"""In a list, of which the tenth entry is like the others."""
MARKS = 2048
"""Of what decoders in C tell: each is a piece of Python to the guide, who sees nothing else of them."""


def main(name: str, seconds: str, seed: str, corpus: str, found: str) -> None:
    """Fuzz the decoder `name` for so long; `corpus` is read and added to, inputs with findings go to `found`."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["mooncake_zmq", "gguf"]):
        from mooncake_zmq.fuzz.decoders import DECODERS, PLANTED
        from mooncake_zmq.fuzz.examination import Finding, examine

    decoder = PLANTED if name == PLANTED.name else DECODERS[name]
    for number, raw in enumerate(decoder.seeds()):
        examine(decoder, raw)  # what is opened or made at the first use is not the input's
        Path(corpus, f"seed-{number}").write_bytes(raw)
    marks = [_mark(atheris) for _ in range(MARKS)]

    def heed(told: str) -> None:
        what, at, where = told.partition(" - at ")  # as msgspec tells where in a record it was; of all else the code tells more
        kind = f"{_QUOTED.sub('', what)}{_FAR.sub('', where)}" if at else ""
        marks[crc32(kind.encode(errors="replace")) % MARKS]()

    known: dict[tuple[str, str, str], Finding] = {}

    def one(raw: bytes) -> None:
        finding = examine(decoder, raw, heed)
        if finding is not None and finding.key not in known and len(known) < MAX_FINDINGS:
            known[finding.key] = finding
            told = {"what": finding.what, "where": finding.where, "path": str(finding.save(Path(found)))}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()

    memory_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes + MORE_MEMORY_BYTES,) * 2)
    options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={decoder.max_bytes}", "-rss_limit_mb=0", "-timeout=60"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={found}/", corpus], one)
    atheris.Fuzz()


def _mark(atheris: Any) -> Callable[[], None]:
    def mark() -> None:
        return

    mark.__code__ = mark.__code__.replace(co_name="mark")  # code of its own: instrumented, it is counted by itself
    marked: Callable[[], None] = atheris.instrument_func(mark)
    return marked


if __name__ == "__main__":
    main(*sys.argv[1:])
