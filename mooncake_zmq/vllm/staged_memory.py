"""Memory of a vLLM's KV blocks on a GPU, or of blocks that are stored in a codec, as `mover.py` copies them."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from mooncake_zmq.kv.codec import Codec
from mooncake_zmq.store.client.batch import Value
from mooncake_zmq.vllm.codes import FLOATS, RUN, BlockCodes


class StagedMemory:
    """Blocks that are copied through other memory: on a GPU pinned and on a separate stream, with a codec in its bytes."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        num_blocks: int,
        staging_bytes: int,
        codec: Codec | None = None,
        keys: Sequence[int] = (),
    ) -> None:
        """`keys`: of each tensor, see `codes.keys_in_a_row`; for a codec that is not alike. Raises ValueError for tensors that
        the codec is not for."""
        self._device = tensors[0].device
        self._is_gpu = is_gpu(self._device)
        runs = keys or [0] * len(tensors)
        self._codes = [None if codec is None else BlockCodes(codec, each, self._device) for each in runs]
        self._tensors = [tensor if codec is not None else tensor.view(torch.uint8) for tensor in tensors]
        self._pieces = [tensor.shape[0] // num_blocks for tensor in tensors]
        """How many pieces a kernel cuts a block into, by tensor."""
        counts = [tensor[0].numel() * pieces for tensor, pieces in zip(self._tensors, self._pieces, strict=True)]
        if codec is not None and not all(tensor.dtype in FLOATS for tensor in tensors):
            raise ValueError(f"kv_codec {codec.name!r} is for KV of floats, and this is {tensors[0].dtype}")
        if codec is not None and any(count % (2 * RUN if keys else RUN) for count in counts):
            raise ValueError(f"kv_codec {codec.name!r} needs a multiple of {RUN} keys and values in each layer of a block")
        sizes = [count if codes is None else codes.bytes_of(count) for codes, count in zip(self._codes, counts, strict=True)]
        self.value_bytes = sum(sizes)
        working = self.value_bytes if codec is None else 4 * max(counts) + self.value_bytes
        self.most = max(1, staging_bytes // working)
        self._staging = [torch.empty((self.most, size), dtype=torch.uint8, pin_memory=self._is_gpu) for size in sizes]
        self._stream = torch.cuda.Stream(self._device) if self._is_gpu else None
        self._fenced = torch.cuda.Event() if self._is_gpu else None
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Make later copies wait for what is on the engine's stream by now; called on the engine's thread."""
        if not self._is_gpu:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._fenced = event

    def sources(self, blocks: Sequence[int]) -> list[Value]:
        with self._ordered():
            for tensor, pieces, codes, staged in self._each():
                gathered = tensor.index_select(0, self._rows(blocks, pieces)).reshape(len(blocks), -1)
                coded = gathered if codes is None else codes.encode(gathered)
                staged[: len(blocks)].copy_(coded, non_blocking=True)
        return self.targets(blocks)

    def targets(self, blocks: Sequence[int]) -> list[Value]:
        return [[(staged[row].data_ptr(), staged.shape[1]) for staged in self._staging] for row in range(len(blocks))]

    def arrived(self, blocks: Sequence[int]) -> None:
        with self._ordered():
            for tensor, pieces, codes, staged in self._each():
                values = staged[: len(blocks)].to(self._device, non_blocking=True)
                if codes is not None:
                    values = codes.decode(values, tensor.dtype)
                tensor.index_copy_(0, self._rows(blocks, pieces), values.reshape(-1, *tensor.shape[1:]))

    def _each(self) -> Iterator[tuple[torch.Tensor, int, BlockCodes | None, torch.Tensor]]:
        return zip(self._tensors, self._pieces, self._codes, self._staging, strict=True)

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[None]:
        """Run what follows on the stream of its own, after the fence, and wait for its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            with self._lock:
                self._stream.wait_event(self._fenced)
            yield
        self._stream.synchronize()

    def _rows(self, blocks: Sequence[int], pieces: int) -> torch.Tensor:
        return torch.tensor([block * pieces + piece for block in blocks for piece in range(pieces)], device=self._device)


def is_gpu(device: torch.device) -> bool:
    """Return whether copies are ordered by streams there."""
    return str(device.type) == "cuda"
