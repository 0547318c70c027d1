"""What the processes of a test cluster import as CuPy: the stand-in, with one GPU for all of them, whose allocations are files
that each process maps at another address."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from cuda_stand_in import CUDARuntimeError, FakeCupy, Gpu, Runtime  # noqa: E402

DIRECTORY = Path(os.environ["STAND_IN_GPU"])


class SharedRuntime(Runtime):
    """Handles that mean something to other processes."""

    def __init__(self, gpu, others=()):
        super().__init__(gpu, others)
        self.names = {}

    def malloc(self, size):
        path = DIRECTORY / f"{os.getpid()}-{len(self.names)}"
        path.write_bytes(b"\xa5" * size)
        return self.map(path, self)

    def ipcGetMemHandle(self, pointer):  # noqa: N802
        return self.names[pointer].encode().ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle):  # noqa: N802
        path = DIRECTORY / handle.rstrip(b"\0").decode()
        if path.name.startswith(f"{os.getpid()}-") or not path.exists():
            raise CUDARuntimeError("cudaErrorInvalidValue")
        address = self.map(path, None)
        self.opened[address] = 1
        return address

    def ipcCloseMemHandle(self, base):  # noqa: N802
        super().ipcCloseMemHandle(base)
        del self.gpu.allocations[base]

    def map(self, path, process):
        with path.open("r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self.gpu.allocations[memory.ctypes.data] = (memory, process)
        self.names[memory.ctypes.data] = path.name
        return memory.ctypes.data


sys.modules[__name__] = FakeCupy(Gpu(), kind=SharedRuntime)
