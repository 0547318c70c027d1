"""Memory of a vLLM's KV blocks on a GPU, as `mover.py` copies them."""

import threading
from collections.abc import Sequence

import torch

from mooncake_zmq.store.client.batch import Value


class DeviceMemory:
    """Blocks on a GPU, copied through pinned memory on a separate stream."""

    def __init__(self, tensors: list[torch.Tensor], num_blocks: int, staging_bytes: int) -> None:
        self._device = tensors[0].device
        self._tensors = [tensor.view(torch.uint8) for tensor in tensors]
        self._pieces = [tensor.shape[0] // num_blocks for tensor in tensors]
        """How many pieces a kernel cuts a block into, by tensor."""
        sizes = [tensor[0].numel() * pieces for tensor, pieces in zip(self._tensors, self._pieces, strict=True)]
        self.value_bytes = sum(sizes)
        self.most = max(1, staging_bytes // self.value_bytes)
        self._staging = [torch.empty((self.most, size), dtype=torch.uint8, pin_memory=True) for size in sizes]
        self._stream = torch.cuda.Stream(self._device)
        self._fenced = torch.cuda.Event()
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Make later copies wait for what is on the engine's stream by now; called on the engine's thread."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._fenced = event

    def sources(self, blocks: Sequence[int]) -> list[Value]:
        with torch.cuda.stream(self._stream):
            self._wait()
            for tensor, pieces, staged in zip(self._tensors, self._pieces, self._staging, strict=True):
                gathered = tensor.index_select(0, self._rows(blocks, pieces))
                staged[: len(blocks)].copy_(gathered.reshape(len(blocks), -1), non_blocking=True)
        self._stream.synchronize()
        return self.targets(blocks)

    def targets(self, blocks: Sequence[int]) -> list[Value]:
        return [[(staged[row].data_ptr(), staged.shape[1]) for staged in self._staging] for row in range(len(blocks))]

    def arrived(self, blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            self._wait()
            for tensor, pieces, staged in zip(self._tensors, self._pieces, self._staging, strict=True):
                values = staged[: len(blocks)].to(self._device, non_blocking=True)
                tensor.index_copy_(0, self._rows(blocks, pieces), values.reshape(-1, *tensor.shape[1:]))
        self._stream.synchronize()

    def _wait(self) -> None:
        with self._lock:
            self._stream.wait_event(self._fenced)

    def _rows(self, blocks: Sequence[int], pieces: int) -> torch.Tensor:
        return torch.tensor([block * pieces + piece for block in blocks for piece in range(pieces)], device=self._device)
