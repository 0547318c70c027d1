"""Run by path in a Python that has vLLM: blocks of a device through staging memory, with the CPU as the device.

What is left out is what a GPU does by itself: streams, events and pinning, which are stood in for by nothing.
"""

import contextlib
import ctypes

import torch

BLOCKS = 6


class Nothing:
    """A stream or an event."""

    def __init__(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


def main() -> None:
    empty = torch.empty
    torch.empty = lambda *arguments, pin_memory=False, **more: empty(*arguments, **more)
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    from mooncake_zmq.vllm.device_memory import DeviceMemory

    torch.manual_seed(0)
    for pieces in (1, 2):
        tensors = [
            torch.randn(BLOCKS * pieces, 2, 4, 8),
            torch.randn(BLOCKS * pieces, 4, 2, 8, dtype=torch.bfloat16).transpose(1, 2),
        ]
        was = [tensor.clone() for tensor in tensors]
        memory = DeviceMemory(tensors, BLOCKS, 1 << 20)
        assert memory.value_bytes == pieces * (64 * 4 + 64 * 2)
        memory.fence()
        values = [[ctypes.string_at(*span) for span in value] for value in memory.sources([4, 1])]
        for tensor in tensors:
            tensor.zero_()
        for value, target in zip(values, memory.targets([0, 3]), strict=True):
            for part, (address, size) in zip(value, target, strict=True):
                assert len(part) == size
                ctypes.memmove(address, part, size)
        memory.arrived([0, 3])
        for tensor, before in zip(tensors, was, strict=True):
            rows, old = tensor.unflatten(0, (BLOCKS, pieces)), before.unflatten(0, (BLOCKS, pieces))
            assert torch.equal(rows[0], old[4])
            assert torch.equal(rows[3], old[1])
            assert not rows[[1, 2, 4, 5]].any()
    assert DeviceMemory(tensors, BLOCKS, 1).most == 1, "one block at least"


if __name__ == "__main__":
    main()
