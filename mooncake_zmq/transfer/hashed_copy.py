"""Copies of bytes within this process's memory, with the xxh3-64 of the copied bytes; independent of slots and keys.

Sketch. Hashing a value after its copy reads it from memory once more: with copies of 7 GB/s and cold reads of 12, 0.6 of the
copy's speed is left. So bytes are hashed while they are in the core's own cache, piece by piece: 0.7 to 0.8. Where llvmlite is
installed (extra `compiled`), our own routine hashes the registers through which the bytes pass: one pass, one call
without the GIL, as fast as the copy alone; from 1 MiB on 1.2 to 1.5 times as fast, as it does not read a target before it
overwrites it. A second thread for hashing costs more in handing pieces over than it saves.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog
import xxhash

PIECE_BYTES = 256 << 10
"""Bytes hashed at once: with its source, a piece fits into 0.5 MiB of a core's own cache; smaller pieces measured slower, for
their calls."""
ROUTINE_FROM_BYTES = 16 << 10
"""Size from which the routine's call is worth its cost. (Up to 240 bytes xxh3 is another function than the routine's.)"""
STRIPE_BYTES = 64
"""Bytes that the routine processes at a time."""
READ, WRITE = 0x100, 0x200
"""Access modes of `view_memory`, with the values of Python's C interface."""

Span = tuple[int, int]
"""(address, bytes) in this process's memory."""

log = structlog.get_logger()

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Routine:
    """Machine code for this CPU that copies and hashes in one pass. Callable from any thread while this object exists."""

    def __init__(self) -> None:
        """Compile the routine, in some 0.1 to 0.5 s, with 45 to 70 MiB, most of them LLVM's own code. Raises ImportError
        without llvmlite, OSError where memory may not become code, and UNUSABLE."""
        # Checked first: LLVM does not notice, and the process would crash.
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
        module = llvm.parse_assembly(Path(__file__).with_suffix(".ll").read_text(encoding="utf-8"))
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()  # no more: LLVM would make a copy, and then a hash, of the one loop
        passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3)))
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        prototype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, *2 * [ctypes.c_uint64])
        self._call = prototype(self._engine.get_function_address("copy_hashed"))

    def __call__(self, whole: int, spans: Sequence[Span], size: int, *, outward: bool) -> int:
        """See `copy_spans`; valid for more than 240 bytes, and for spans of whole stripes but for the last."""
        table = (ctypes.c_uint64 * (2 * len(spans)))(*(number for span in spans for number in span))
        checksum: int = self._call(whole, table, size, outward)
        return checksum


def view_memory(address: int, size: int, access: int) -> memoryview:
    """Return a view of the bytes at an address, which the caller keeps in place."""
    view: memoryview = _view_memory(address, size, access)
    return view


def copy_hashed(target: int, source: int, size: int) -> int:
    """Copy `size` bytes between addresses whose ranges do not overlap; returns their xxh3-64. Other threads run meanwhile."""
    return copy_spans(target, ((source, size),), size, outward=False)


def copy_spans(whole: int, spans: Sequence[Span], size: int, *, outward: bool, hashed: bool = True) -> int:
    """Copy `size` bytes between `whole` and `spans`, which hold as many, one after another; returns the xxh3-64 of those at
    `whole`, or any number unless `hashed`.

    With the routine it is one call for any number of spans. Each of a hundred calls would release the interpreter's lock, and
    wait 5 ms for it if another thread computes without a pause, as an engine that waits for a load does.
    """
    assert sum(span_bytes for _, span_bytes in spans) == size, "the spans hold less than the value"
    if len(spans) == 1 and not hashed:
        ((address, _),) = spans
        ctypes.memmove(*((address, whole) if outward else (whole, address)), size)
        return 0
    routine = _routine.get() if size >= ROUTINE_FROM_BYTES and _are_stripes(spans) else None
    if routine is None:
        return copy_in_pieces(whole, spans, size, outward=outward, hashed=hashed)
    return routine(whole, spans, size, outward=outward)


def _are_stripes(spans: Sequence[Span]) -> bool:
    return not any(span_bytes % STRIPE_BYTES for _, span_bytes in spans[:-1])


def copy_in_pieces(whole: int, spans: Sequence[Span], size: int, *, outward: bool, hashed: bool = True) -> int:
    """Do the work of `copy_spans` without the routine."""
    arrived = view_memory(whole, size, READ)
    hasher = xxhash.xxh3_64()
    done = seen = 0
    for address, span_bytes in spans:
        for at in range(0, span_bytes, PIECE_BYTES):
            step = min(PIECE_BYTES, span_bytes - at)
            target, source = (address + at, whole + done) if outward else (whole + done, address + at)
            ctypes.memmove(target, source, step)
            done += step
            if hashed and (done - seen >= PIECE_BYTES or done == size):
                hasher.update(arrived[seen:done])
                seen = done
    return hasher.intdigest()


UNUSABLE = (OSError, RuntimeError, AttributeError, TypeError)
"""Errors where memory may not become code, or where llvmlite is too old."""


class _Once:
    """The process's routine, made by the first copy that needs it; None where it cannot be made."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._is_made = False
        self._routine: Routine | None = None

    def get(self) -> Routine | None:
        if not self._is_made:
            with self._making:
                if not self._is_made:
                    try:
                        self._routine = self._make()
                    finally:
                        self._is_made = True
        return self._routine

    def forked(self) -> None:
        """Reset the state in the child of a fork, where the thread that may have been making the routine does not exist."""
        self._making = threading.Lock()

    @staticmethod
    def _make() -> Routine | None:
        try:
            routine = Routine()
        except ImportError:
            return None
        except UNUSABLE as error:
            log.warning("copies are hashed in pieces", reason=str(error)[:200])
            return None
        return routine if _is_right(routine) else None


def _is_right(routine: Routine) -> bool:
    """Return whether the routine agrees with xxHash on some bytes, copied from two spans and back: a compiler's error must not
    make every block a miss."""
    source = bytearray(range(251)) * 70
    size, cut = len(source), 4096
    whole, target = bytearray(size), bytearray(size)
    at, between, to = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, whole, target))
    sums = [
        routine(between, [(place, cut), (place + cut, size - cut)], size, outward=outward)
        for place, outward in ((at, False), (to, True))
    ]
    if sums == [xxhash.xxh3_64_intdigest(source)] * 2 and target == source:
        return True
    log.warning("copies are hashed in pieces", reason="the routine's checksums are wrong")
    return False


_routine = _Once()
os.register_at_fork(after_in_child=_routine.forked)
