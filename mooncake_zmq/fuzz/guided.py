"""A process that fuzzes one decoder by atheris, which sees what code an input reaches: `python -m mooncake_zmq.fuzz.guided`.

It prints each finding as a line of JSON. libFuzzer prints its own progress and ends the process without a cleanup: the parent
process sets a TMPDIR, and removes it.
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
"""The memory that the process may take beyond what it has at its begin: a larger request is a finding instead of the machine's
end."""
MAX_FINDINGS = 20
_QUOTED = re.compile(r"'.*'|\".*\"|0x\w+|\d+|, got .*", re.DOTALL)
"""The parts of an error that come from the input, of which no two are alike."""
_FAR = re.compile(r"\d\d+")
"""The index of an entry far into a list, where the tenth entry is like the others."""
MARKS = 2048
"""The number of distinct results of decoders in C: each has a piece of Python that the guide sees, as it sees no C code."""


def main(name: str, seconds: str, seed: str, corpus: str, found: str) -> None:
    """Fuzz the decoder `name` for so long; `corpus` is read and added to, inputs with findings go to `found`."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["mooncake_zmq", "gguf"]):
        from mooncake_zmq.fuzz.decoders import DECODERS, PLANTED
        from mooncake_zmq.fuzz.examination import Finding, examine

    decoder = PLANTED if name == PLANTED.name else DECODERS[name]
    for number, raw in enumerate(decoder.seeds()):
        examine(decoder, raw)  # what is opened or made at the first use does not count
        Path(corpus, f"seed-{number}").write_bytes(raw)
    marks = [_mark(atheris) for _ in range(MARKS)]

    def heed(result: str) -> None:
        what, at, where = result.partition(" - at ")  # msgspec's errors end with the place in the record
        kind = f"{_QUOTED.sub('', what)}{_FAR.sub('', where)}" if at else ""
        marks[crc32(kind.encode(errors="replace")) % MARKS]()

    known: dict[tuple[str, str, str], Finding] = {}

    def one(raw: bytes) -> None:
        finding = examine(decoder, raw, heed)
        if finding is not None and finding.key not in known and len(known) < MAX_FINDINGS:
            known[finding.key] = finding
            line = {"what": finding.what, "where": finding.where, "path": str(finding.save(Path(found)))}
            sys.stdout.write(json.dumps(line) + "\n")
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
