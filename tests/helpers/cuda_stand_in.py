"""CuPy without a GPU: the parts that we use, over host memory, with CUDA's rules enforced and its laziness kept.

A copy, or a write to a device array within a stream, happens when that stream is synchronized, and not before: whoever forgets
to wait reads what was there. Work on the default stream happens at once, but until that is synchronized too, no other stream
may be given work: on a GPU the two would race. Device arrays do not turn into NumPy's by themselves, nor take any as operands.
"""

import ctypes
import threading
import types
import weakref
from collections import deque
from typing import Any

import numpy as np
from cuda_kernels import Cublas, Module

HOST_TO_DEVICE, DEVICE_TO_HOST, DEFAULT = 1, 2, 4


class CUDARuntimeError(RuntimeError):
    pass


class Broken(AssertionError):
    """A rule of CUDA's that the real one answers with wrong bytes, a crash, or nothing at all."""


class Gpu:
    """One device's memory, and the handles to it; its processes are `FakeCupy`s."""

    def __init__(self, uuid=b"GPU-0123456789ab", memory_bytes=1 << 30):
        self.uuid, self.memory_bytes = uuid, memory_bytes
        self.allocations = {}
        """Base of each `malloc`: (memory, process)."""
        self.handles = {}
        self.arrays = weakref.WeakValueDictionary()
        """What arrays lie in, by its address."""
        self.lock = threading.RLock()
        """Of `arrays`, which cannot be listed while one is added."""


class Runtime:
    """`cupy.cuda.runtime` of one process."""

    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4

    def __init__(self, gpu, others=()):
        self.gpu, self.devices = gpu, [gpu, *others]
        self.opened = {}
        """Addresses of neighbours' allocations that are open here: how often."""
        self.registered = {}
        self.registering_threads = set()
        self.host_memory = {}
        self.streams = {}
        self.lock_limit = 1 << 62
        self.free_bytes = 1 << 30
        """For arrays."""
        self.reads_registered = 1
        self.pageable_bytes = 0
        """Copied from or to host memory that was not pinned."""
        self.of_thread = threading.local()
        self.lock = threading.RLock()

    @property
    def default_stream_is_busy(self):
        """With what this thread gave it."""
        return getattr(self.of_thread, "busy", False)

    @default_stream_is_busy.setter
    def default_stream_is_busy(self, busy):
        self.of_thread.busy = busy

    # --- devices

    def getDevice(self):  # noqa: N802
        return 0

    def getDeviceCount(self):  # noqa: N802
        return len(self.devices)

    def getDeviceProperties(self, device):  # noqa: N802
        return {"uuid": self.devices[device].uuid.partition(b"\0")[0], "name": b"stand-in"}

    def deviceGetAttribute(self, attribute, device):  # noqa: N802
        assert (attribute, device) == (91, 0)
        return self.reads_registered

    def pointerGetAttributes(self, address):  # noqa: N802
        return types.SimpleNamespace(type=2 if self.owner(address, 1) is not None else 0)

    def runtimeGetVersion(self):  # noqa: N802
        return 13000

    def memGetInfo(self):  # noqa: N802
        used = sum(memory.nbytes for memory, _ in self.gpu.allocations.values())
        return self.gpu.memory_bytes - used, self.gpu.memory_bytes

    # --- memory

    def malloc(self, size):
        if size > self.memGetInfo()[0]:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        memory = np.full(size, 0xA5, np.uint8)
        self.gpu.allocations[memory.ctypes.data] = (memory, self)
        return memory.ctypes.data

    def free(self, base):
        if self.gpu.allocations.get(base, (None, None))[1] is not self:
            raise CUDARuntimeError("cudaErrorInvalidValue: not the base of an allocation of this process")
        if any(other.opened.get(base) for other in PROCESSES if other.gpu is self.gpu):
            raise Broken("freed while a neighbour has it open")
        del self.gpu.allocations[base]

    def give_back(self, size):
        self.free_bytes += size

    def ipcGetMemHandle(self, pointer):  # noqa: N802
        base = next(base for base, (memory, _) in self.gpu.allocations.items() if base <= pointer < base + memory.nbytes)
        handle = base.to_bytes(8, "little") + bytes(56)  # of the base, whatever of the allocation was asked for
        self.gpu.handles[handle] = base
        return handle

    def ipcOpenMemHandle(self, handle):  # noqa: N802
        for gpu in self.devices:
            base = gpu.handles.get(handle)
            if base in gpu.allocations:
                if gpu.allocations[base][1] is self:
                    raise CUDARuntimeError("cudaErrorInvalidContext: exported by this process")
                self.opened[base] = self.opened.get(base, 0) + 1
                return base
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: unknown handle")

    def ipcCloseMemHandle(self, base):  # noqa: N802
        if not self.opened.get(base):
            raise CUDARuntimeError("cudaErrorInvalidValue: not open here")
        self.opened[base] -= 1

    def hostAlloc(self, size, flags):  # noqa: N802
        memory = np.zeros(size, np.uint8)
        self.host_memory[memory.ctypes.data] = memory
        self.registered[memory.ctypes.data] = size
        return memory.ctypes.data

    def freeHost(self, address):  # noqa: N802
        if any(queue for queue in self.streams.values()):
            raise Broken("pinned memory freed while copies are queued")
        del self.host_memory[address], self.registered[address]

    def hostRegister(self, address, size, flags):  # noqa: N802
        if address % 4096 or size % 4096 or not size:
            raise CUDARuntimeError("cudaErrorInvalidValue: not whole pages")
        if any(address < start + length and start < address + size for start, length in self.registered.items()):
            raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        if sum(self.registered.values()) + size > self.lock_limit:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: cannot lock")
        self.registering_threads.add(threading.current_thread())
        ctypes.string_at(address, size)  # as the driver does, this faults where nothing is mapped
        self.registered[address] = size

    def hostUnregister(self, address):  # noqa: N802
        if address not in self.registered:
            raise CUDARuntimeError("cudaErrorHostMemoryNotRegistered")
        ctypes.string_at(address, self.registered.pop(address))

    # --- copies

    def memcpyAsync(self, target, source, size, kind, stream):  # noqa: N802
        owners = self.owner(target, size), self.owner(source, size)
        on_device = tuple(owner is not None for owner in owners)
        if on_device != {HOST_TO_DEVICE: (True, False), DEVICE_TO_HOST: (False, True)}.get(kind, (True, True)):
            raise Broken(f"a copy of kind {kind} between memory that is on the device: {on_device}")
        host = source if kind == HOST_TO_DEVICE else target if kind == DEVICE_TO_HOST else None
        if host is not None and not any(at <= host and host + size <= at + n for at, n in self.registered.items()):
            self.pageable_bytes += size
        checks = [
            self.held(*place)
            for place, owner in zip(((target, size), (source, size)), owners, strict=True)
            if owner is not None
        ]

        def copy():
            for check in checks:
                check()
            ctypes.memmove(target, source, size)

        self.queue(stream, copy)

    def held(self, address, size):
        """To be called when device memory is used, after it was asked for."""
        reference = weakref.ref(self.owner(address, size))

        def check():
            if reference() is None:
                raise Broken("device memory went before a copy from or to it had ended")

        return check

    def require_reach(self, address, size):
        """Of a kernel: device memory, or pinned host memory."""
        is_pinned = any(at <= address and address + size <= at + n for at, n in self.registered.items())
        if not is_pinned and self.owner(address, size) is None:
            raise Broken("a kernel uses host memory that is not pinned")

    def queue(self, stream, work):
        if self.default_stream_is_busy:
            raise Broken("the default stream was not synchronized before another one was given work")
        with self.lock:
            self.streams[stream].append(work)

    def synchronize(self, stream):
        queue = self.streams[stream]
        while queue:
            queue.popleft()()

    def owner(self, address, size):
        """The device memory that a range lies in, or None."""
        for gpu in self.devices:
            for base, (memory, process) in list(gpu.allocations.items()):
                if base <= address and address + size <= base + memory.nbytes:
                    if process is not self and not self.opened.get(base):
                        raise Broken("a neighbour's memory that is not open here")
                    return memory
            with gpu.lock:
                arrays = list(gpu.arrays.items())
            for start, memory in arrays:
                if start <= address and address + size <= start + memory.nbytes:
                    return memory
        return None


PROCESSES: list[Runtime] = []


class FakeCupy:
    """The module `cupy`, as one process sees it."""

    __version__ = "14"
    float32, complex64, int32, int64 = np.float32, np.complex64, np.int32, np.int64

    def __init__(self, gpu, others=(), *, kind=Runtime):
        runtime = self.runtime = kind(gpu, others)
        PROCESSES.append(runtime)
        self.current = threading.local()
        self.launches = 0
        self.staging_bytes = 0
        """What `asarray` came through, and CuPy keeps."""
        default = types.SimpleNamespace(ptr=0, synchronize=lambda: setattr(runtime, "default_stream_is_busy", False))
        xp = self

        class Stream:
            def __init__(self, non_blocking=False):
                assert non_blocking, "a blocking stream would wait for the engine's"
                self.ptr = id(self)
                runtime.streams[self.ptr] = deque()

            def synchronize(self):
                runtime.synchronize(self.ptr)

            def __enter__(self):
                xp.current.stack = [*getattr(xp.current, "stack", ()), self]

            def __exit__(self, *_):
                xp.current.stack.pop()

        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            Stream=Stream,
            get_current_stream=lambda: self.stream() or default,
            cublas=Cublas(self),
            device=types.SimpleNamespace(get_cublas_handle=lambda: 1),
        )
        for name in ("sqrt", "exp", "tanh", "cos", "sin", "multiply", "matmul", "einsum"):
            setattr(self, name, self._function(getattr(np, name)))

    def RawModule(self, *, code, options):  # noqa: N802
        return Module(self, code, options)

    def stream(self):
        stack = getattr(self.current, "stack", ())
        return stack[-1] if stack else None

    def empty(self, shape, dtype=np.float32):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.runtime.free_bytes -= size
        if self.runtime.free_bytes < 0:
            raise MemoryError("out of memory")
        memory = np.full(size, 0xFF, np.uint8)  # of floats, this is NaN
        with self.runtime.gpu.lock:
            self.runtime.gpu.arrays[memory.ctypes.data] = memory
        weakref.finalize(memory, self.runtime.give_back, size)
        return DeviceArray(self, memory.view(dtype).reshape(shape))

    def get_default_pinned_memory_pool(self):
        def free_all_blocks():
            if self.runtime.default_stream_is_busy:
                raise Broken("staging that is in use is not freed: synchronize first")
            self.staging_bytes = 0

        return types.SimpleNamespace(free_all_blocks=free_all_blocks)

    def zeros(self, shape, dtype=np.float32):
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def asarray(self, value, dtype=None):
        if isinstance(value, DeviceArray):
            assert dtype in (None, value.dtype)
            return value
        value = np.asarray(value, dtype)
        array = self.empty(value.shape, value.dtype)
        array._array[...] = value
        self.staging_bytes += value.nbytes
        self._launched()
        return array

    def _launched(self):
        """Work that happens at once: only right on the default stream."""
        if self.stream():
            raise Broken("only copies and writes are made on a stream of one's own here")
        self.runtime.default_stream_is_busy = True
        self.launches += 1

    def _function(self, function):
        def call(*arguments, out=None):
            values = [_operand(each) for each in arguments]
            self._launched()
            if out is None:
                return DeviceArray(self, function(*values))
            function(*values, out=_operand(out))
            return out

        return call


def _operand(value: Any) -> Any:
    if isinstance(value, DeviceArray):
        return value._array
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


def _index(index: Any) -> Any:
    return tuple(_operand(each) for each in index) if isinstance(index, tuple) else _operand(index)


class DeviceArray:
    """`cupy.ndarray`."""

    __hash__ = None

    def __init__(self, xp, array):
        self._xp, self._array = xp, array

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self._array.ctypes.data)

    @property
    def T(self):  # noqa: N802
        return DeviceArray(self._xp, self._array.T)

    def get(self):
        assert self._xp.stream() is None
        self._xp.runtime.default_stream_is_busy = False
        return self._array.copy()

    def __array__(self, *_arguments, **_options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_function__(self, function, *_arguments):
        raise TypeError(f"numpy.{function.__name__} of a device array")

    def __array_ufunc__(self, function, method, *inputs, out=None, **options):
        assert method == "__call__"
        assert out is None
        return self._xp._function(function)(*inputs, **options)

    def __getitem__(self, index):
        return DeviceArray(self._xp, self._array[_index(index)])

    def __setitem__(self, index, value):
        target, value = self._array, _operand(value)
        index = _index(index)
        stream = self._xp.stream()
        if stream is None:
            self._xp._launched()
            target[index] = value
        else:
            self._xp.runtime.queue(stream.ptr, lambda: target.__setitem__(index, value))

    def __len__(self):
        return len(self._array)

    def __float__(self):
        return float(self._array)

    def __iter__(self):
        raise TypeError("a loop over a device array copies each item")


for _name in ("shape", "dtype", "ndim", "size", "nbytes", "strides", "flags"):
    setattr(DeviceArray, _name, property(lambda self, name=_name: getattr(self._array, name)))
for _name in ("reshape", "transpose", "view", "astype", "sum", "max", "min"):

    def _method(self, *arguments, _name=_name, **options):
        if _name in ("astype", "sum", "max", "min"):
            self._xp._launched()
        result = getattr(self._array, _name)(*arguments, **options)
        return DeviceArray(self._xp, np.asarray(result))

    setattr(DeviceArray, _name, _method)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"):

    def _binary(self, other, _name=f"__{_name}__"):
        other = _operand(other)
        self._xp._launched()
        return DeviceArray(self._xp, getattr(self._array, _name)(other))

    def _swapped(self, other, _name=f"__r{_name}__"):
        other = _operand(other)
        self._xp._launched()
        return DeviceArray(self._xp, getattr(self._array, _name)(other))

    def _in_place(self, other, _name=f"__i{_name}__"):
        other = _operand(other)
        self._xp._launched()
        getattr(self._array, _name)(other)
        return self

    setattr(DeviceArray, f"__{_name}__", _binary)
    setattr(DeviceArray, f"__r{_name}__", _swapped)
    setattr(DeviceArray, f"__i{_name}__", _in_place)
