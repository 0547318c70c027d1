"""Run by path in a Python that has vLLM: blocks through staging memory, of a device, with the CPU as the device, and in codecs.

What is left out is what a GPU does by itself: streams, events and pinning, which are stood in for by nothing.
"""

import contextlib
import ctypes
from collections.abc import Sequence
from types import SimpleNamespace as Told

import torch

from mooncake_zmq.kv.codec import CODECS, Codec
from mooncake_zmq.vllm import staged_memory
from mooncake_zmq.vllm.codes import RUN, BlockCodes, keys_in_a_row
from mooncake_zmq.vllm.staged_memory import StagedMemory

BLOCKS = 6


class Nothing:
    """A stream or an event."""

    def __init__(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


def stand_in() -> None:
    """Take the CPU for a GPU."""
    empty = torch.empty
    torch.empty = lambda *arguments, pin_memory=False, **more: empty(*arguments, **more)
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    staged_memory.is_gpu = lambda device: True


def layers(pieces: int) -> list[torch.Tensor]:
    return [
        torch.randn(BLOCKS * pieces, 2, 4, 8),
        torch.randn(BLOCKS * pieces, 4, 2, 8, dtype=torch.bfloat16).transpose(1, 2),
    ]


def moved(memory: StagedMemory, tensors: Sequence[torch.Tensor]) -> None:
    """Copy blocks 4 and 1 out, wipe all, and copy them in as 0 and 3."""
    memory.fence()
    values = [[ctypes.string_at(*span) for span in value] for value in memory.sources([4, 1])]
    for tensor in tensors:
        tensor.zero_()
    for value, target in zip(values, memory.targets([0, 3]), strict=True):
        for part, (address, size) in zip(value, target, strict=True):
            assert len(part) == size
            ctypes.memmove(address, part, size)
    memory.arrived([0, 3])


def blocks_of_a_device() -> None:
    for pieces in (1, 2):
        tensors = layers(pieces)
        was = [tensor.clone() for tensor in tensors]
        memory = StagedMemory(tensors, BLOCKS, 1 << 20)
        assert memory.value_bytes == pieces * (64 * 4 + 64 * 2)
        moved(memory, tensors)
        for tensor, before in zip(tensors, was, strict=True):
            rows, old = tensor.unflatten(0, (BLOCKS, pieces)), before.unflatten(0, (BLOCKS, pieces))
            assert torch.equal(rows[0], old[4])
            assert torch.equal(rows[3], old[1])
            assert not rows[[1, 2, 4, 5]].any()
    assert StagedMemory(tensors, BLOCKS, 1).most == 1, "one block at least"


def blocks_in(codec: Codec, most: float) -> None:
    for pieces in (1, 2):
        tensors = layers(pieces)
        was = [tensor.clone() for tensor in tensors]
        memory = StagedMemory(tensors, BLOCKS, 1 << 20, codec)
        assert memory.value_bytes == 2 * pieces * (RUN * codec.key_bits // 8 + 2)
        moved(memory, tensors)
        for tensor, before in zip(tensors, was, strict=True):
            rows, old = tensor.unflatten(0, (BLOCKS, pieces)).float(), before.unflatten(0, (BLOCKS, pieces)).float()
            for new, former in ((0, 4), (3, 1)):
                lost = (rows[new] - old[former]).norm() / old[former].norm()
                assert 0 < lost < most, lost
            assert not rows[[1, 2, 4, 5]].any()


def layer(backend: str, head_size: int = 16) -> Told:
    return Told(get_attn_backend=lambda: Told(get_name=lambda: backend), head_size=head_size)


def keys_and_values_in(codec: Codec) -> None:
    """Blocks [head, token, content] whose keys are large: where they are taken for values, both are lost."""
    for backend, axis in (("CPU_ATTN", 1), ("FLASH_ATTN", 2)):
        for pieces in (1, 2):
            tensor = torch.randn(BLOCKS * pieces, 2, 8, 2, 16, dtype=torch.bfloat16)
            if axis == 1:
                tensor = tensor.transpose(2, 3).contiguous()
            tensor.select(1 + axis, 0).mul_(100)
            was = tensor.clone().unflatten(0, (BLOCKS, pieces))
            given = tensor.reshape(len(tensor), 2, 8, 32)
            keys = keys_in_a_row(layer(backend), given.shape)
            memory = StagedMemory([given], BLOCKS, 1 << 20, codec, [keys])
            assert memory.value_bytes == pieces * 256 // 8 * (codec.key_bits + codec.value_bits) + 4 * pieces * 256 // RUN
            moved(memory, [given])
            back = tensor.unflatten(0, (BLOCKS, pieces))
            for kind, (least, most) in enumerate(((0, 0.02), (0.05, 0.2))):
                new, old = (each.select(2 + axis, kind).float() for each in (back[[0, 3]], was[[4, 1]]))
                lost = (new - old).norm() / old.norm()
                assert least < lost < most, (backend, kind, lost)
            assert not back[[1, 2, 4, 5]].any()


def where_keys_lie_is_known() -> None:
    for unknown in (layer("ROCM_ATTN"), layer("FLASH_ATTN", head_size=24)):
        said = ""
        try:
            keys_in_a_row(unknown, (6, 2, 8, 32))
        except ValueError as error:
            said = str(error)
        assert "does not know where" in said


def what_cannot_be_coded() -> None:
    for tensor in (torch.zeros(BLOCKS, 64, dtype=torch.uint8), torch.zeros(BLOCKS, 65)):
        said = ""
        try:
            StagedMemory([tensor], BLOCKS, 1 << 20, CODECS["int8"])
        except ValueError as error:
            said = str(error)
        assert "kv_codec 'int8'" in said


def what_is_nothing_or_not_finite() -> None:
    numbers = torch.ones(3, RUN)
    numbers[0] = 0
    numbers[1, 5] = float("inf")
    for name in ("int8", "int4"):
        codes = BlockCodes(CODECS[name], 0, numbers.device)
        back = codes.decode(codes.encode(numbers.clone()), torch.float32)
        assert not back[0].any()
        assert not torch.isfinite(back[1]).all()
        assert torch.isfinite(back[2]).all()


def main() -> None:
    torch.manual_seed(0)
    blocks_in(CODECS["int8"], 0.02)
    blocks_in(CODECS["int4"], 0.2)
    keys_and_values_in(CODECS["k8v4"])
    where_keys_lie_is_known()
    what_cannot_be_coded()
    what_is_nothing_or_not_finite()
    stand_in()
    blocks_of_a_device()
    blocks_in(CODECS["int8"], 0.02)
    keys_and_values_in(CODECS["k8v4"])


if __name__ == "__main__":
    main()
