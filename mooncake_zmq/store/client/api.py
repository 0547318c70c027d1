"""`MooncakeDistributedStore`: the names, signatures and answers of Mooncake's Python store API, over `StoreClient`.

Answers: 0 or a size where it went well; -600 for what cannot be (an empty key or value, a value above the largest size
class, too small a buffer, a key that is another tenant's to change); -704 not found; -200 no room, as everything is leased or
pinned; -707 the put took longer than it may; -800 bytes were damaged under way; -900 no store answered, or this one was closed.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import structlog

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.store import tensors
from mooncake_zmq.store.client.caller_memory import CallerMemory, joined, spans_of, zip_spans
from mooncake_zmq.store.client.client import UNREACHED, StoreClient
from mooncake_zmq.store.client.key_calls import KeyCalls
from mooncake_zmq.store.client.peer import ClientSettings
from mooncake_zmq.store.client.replicas import ReplicateConfig
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.memory import Buffer, address_of, new_bytes

log = structlog.get_logger()

INVALID = int(Code.INVALID)
KEY_SETTINGS = ("keys", "key_name", "allow_plain_tcp")
KEY_VARIABLES = "MOONCAKE_ZMQ_STORE_"
"""Before the name of one of KEY_SETTINGS, for connectors that pass no settings of ours on."""
IGNORED_SETTINGS = frozenset(
    ("metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices", "ipc_socket_path")
    + ("engine", "enable_ssd_offload", "ssd_offload_path", "enable_client_http_server", "client_http_port")
)
"""Settings of Mooncake's setup that are ignored: memory, disks and transports are the cache-nodes' own affair here."""
_UNSUPPORTED_NAMES = """
    alloc_from_mem_pool allocate_and_mount_segment batch_get_into_multi_buffer_ranges batch_get_session_end
    batch_get_session_start batch_get_tensor_into batch_get_tensor_into_cuda batch_get_tensor_with_parallelism
    batch_get_tensor_with_parallelism_into batch_get_tensor_with_tp batch_get_tensor_with_tp_into batch_pub_tensor
    batch_pub_tensor_with_tp batch_put_from_multi_buffer_ranges batch_put_session_end batch_put_session_revoke
    batch_put_session_start batch_put_tensor_from batch_put_tensor_with_parallelism batch_put_tensor_with_parallelism_from
    batch_put_tensor_with_tp batch_put_tensor_with_tp_from batch_upsert_pub_tensor batch_upsert_tensor batch_upsert_tensor_from
    batch_upsert_tensor_with_parallelism batch_upsert_tensor_with_parallelism_from create_copy_task create_move_task
    get_offload_rpc_read_count get_tensor_into get_tensor_into_cuda get_tensor_with_parallelism get_tensor_with_parallelism_into
    get_tensor_with_tp get_tensor_with_tp_into init_all load_tensor_from_safetensor mount_segment pub_tensor pub_tensor_with_tp
    put_from_with_metadata put_tensor_from put_tensor_with_parallelism put_tensor_with_parallelism_from put_tensor_with_tp
    put_tensor_with_tp_from query_task save_tensor_to_safetensor setup_dummy unmount_and_free_segment unmount_local_disk_segment
    unmount_segment upsert_pub_tensor upsert_tensor upsert_tensor_from upsert_tensor_with_parallelism
    upsert_tensor_with_parallelism_from
"""
UNSUPPORTED = frozenset(_UNSUPPORTED_NAMES.split())
"""Calls of Mooncake's store that raise NotImplementedError here."""


class BufferHandle(bytearray):
    """A value in memory of its own; use it as a buffer."""

    def ptr(self) -> int:
        return address_of(self)

    def size(self) -> int:
        return len(self)


class MooncakeDistributedStore(KeyCalls):
    """A client of the stores of one or several cache-nodes. Thread-safe. No call hangs, before `setup` or after `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._hostname = ""
        self._lock = threading.Lock()
        self._memory = CallerMemory()

    def setup(
        self,
        local_hostname: str | Mapping[str, Any],
        metadata_server: str = "",
        global_segment_size: int = 16 << 20,
        local_buffer_size: int = 16 << 20,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Connect. `master_server_addr`: store endpoints, comma-separated, `host:port` or ZeroMQ's `tcp://`, `ipc://`; where
        keys are needed with the store's name, `NAME@host:port`.

        With a dict as the only argument also every setting of `ClientSettings` by name. Answers 0, -600 or -900, the
        reason logged.
        """
        if isinstance(local_hostname, Mapping):
            config = dict(local_hostname)
        else:
            config = {"local_hostname": local_hostname, "master_server_addr": master_server_addr, "tenant_id": tenant_id}
            config |= {"global_segment_size": global_segment_size, "local_buffer_size": local_buffer_size}
        try:
            hostname, endpoints, settings = read_setup(config)
        except ValueError as error:
            log.error("store_setup_failed", reason=str(error))
            return INVALID
        with self._lock:
            if self._client is not None:
                log.error("store_setup_failed", reason="already set up")
                return INVALID
            try:
                client = StoreClient(endpoints, settings)
            except KeysError as error:
                log.error("store_setup_failed", reason=str(error))
                return INVALID
            reason = client.connect()
            if reason is not None:
                client.close()
                log.error("store_setup_failed", reason=reason)
                return UNREACHED
            self._client, self._hostname = client, hostname
        return 0

    def close(self) -> int:
        """End. Calls under way, and later ones, answer errors."""
        with self._lock:
            client, self._client = self._client, None
        self._memory.unregister_all()
        if client is not None:
            client.close()
        return 0

    def health_check(self) -> int:
        """0 if a store answers."""
        client = self._client
        return 0 if client is not None and client.exist(["health"])[0] != -1 else UNREACHED

    def get_hostname(self) -> str:
        """The name of the store that is asked first, as replica descriptors name it."""
        client = self._client
        return (client.home_name() if client is not None else None) or self._hostname

    # --- memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """A GPU's memory must be registered, and needs the extra gpu-cu12 or gpu-cu13: else -600, the reason logged, here and
        in every call that names it. Any memory of the host can be read and written without."""
        if self._client is None:
            return UNREACHED
        if buffer_ptr <= 0 or size <= 0:
            return INVALID
        return self._memory.register(buffer_ptr, size)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        if self._client is None:
            return UNREACHED
        return self._memory.unregister(buffer_ptr)

    # --- puts

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """0 also if the key has a value, which stays."""
        return self._memory.put(self._client, [key], [spans_of(value)], config)[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None) -> int:
        """0, or the code of the first key that failed."""
        return _first_error(self._memory.put(self._client, keys, [spans_of(value) for value in values], config))

    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """One value of all parts, in order."""
        return self._memory.put(self._client, [key], [joined(parts)], config)[0]

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self._memory.put(self._client, [key], [[(buffer_ptr, size)]], config)[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._memory.put_from(self._client, keys, buffer_ptrs, sizes, config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Each value lies in several buffers, one part after another."""
        values = zip_spans(keys, all_buffer_ptrs, all_sizes)
        return [INVALID] * len(keys) if values is None else self._memory.put(self._client, keys, values, config)

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Store a value whether or not the key has one; readers see the old or the new one."""
        return self._memory.put(self._client, [key], [spans_of(value)], config, Pin.UPSERT)[0]

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None) -> int:
        return _first_error(self._memory.put(self._client, keys, [spans_of(value) for value in values], config, Pin.UPSERT))

    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        return self._memory.put(self._client, [key], [joined(parts)], config, Pin.UPSERT)[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self._memory.put(self._client, [key], [[(buffer_ptr, size)]], config, Pin.UPSERT)[0]

    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._memory.put_from(self._client, keys, buffer_ptrs, sizes, config, Pin.UPSERT)

    # --- gets

    def get(self, key: str) -> bytes:
        """b"" if it is not here."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        values = self._memory.get(self._client, keys, new_bytes)
        return [b"" if value is None else value for value in values]

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        return self._memory.get(self._client, keys, BufferHandle)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """The value's size; -600 if the buffer is smaller, and then nothing is written."""
        return self._memory.get_into(self._client, [key], [[(buffer_ptr, size)]])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        return self._memory.get_into(self._client, keys, [[span] for span in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Each value fills several buffers, one part after another."""
        places = zip_spans(keys, all_buffer_ptrs, all_sizes)
        return [INVALID] * len(keys) if places is None else self._memory.get_into(self._client, keys, places)

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """For each buffer and each of its keys, parts of the value to places in the buffer: the size of each part or a code;
        -600 where it would end behind a registered buffer.
        A value is read and verified as a whole, once for each buffer that names it."""
        rows = (buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        if len(set(map(len, rows))) > 1:
            return [[[INVALID] * len(sizes) for sizes in of_keys] for of_keys in all_sizes]
        return [self._memory.get_ranges(self._client, *row) for row in zip(*rows, strict=True)]

    # --- tensors

    def put_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """A NumPy array or a torch tensor, of numbers; -600 for what is neither."""
        return self.batch_put_tensor([key], [tensor], config)[0]

    def batch_put_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        if len(keys) != len(tensors_list):
            return [INVALID] * len(keys)
        encoded: list[tensors.Encoded | None] = []
        for tensor in tensors_list:
            try:
                encoded.append(tensors.Encoded(tensor))
            except tensors.NotATensor as error:
                log.warning("store_tensor_refused", reason=str(error))
                encoded.append(None)
        return self._memory.put(self._client, keys, [[] if each is None else each.spans for each in encoded], config)

    def get_tensor(self, key: str) -> Any:
        """The tensor given to `put_tensor`, in host memory; None if it is not here or no tensor."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        found: list[Any] = []
        for key, value in zip(keys, self._memory.get(self._client, keys, bytearray), strict=True):
            try:
                found.append(None if value is None else tensors.decode(value))
            except tensors.NotATensor as error:
                log.warning("store_tensor_refused", key=key, reason=str(error))
                found.append(None)
        return found

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in UNSUPPORTED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"MooncakeDistributedStore.{name}")

        return refuse


def _first_error(codes: Sequence[int]) -> int:
    return next((code for code in codes if code != 0), 0)


def read_setup(config: dict[str, Any]) -> tuple[str, list[str], ClientSettings]:
    """(host name, endpoints, settings). Raises ValueError for what cannot be followed."""
    address = str(config.pop("master_server_addr", "") or config.pop("master_server_address", ""))
    config.pop("master_server_address", None)
    hostname = str(config.pop("local_hostname", ""))
    endpoints = [_endpoint(part.strip()) for part in address.split(",") if part.strip()]
    if not endpoints:
        raise ValueError("master_server_addr names no store")
    if config.pop("tenant_id", "default") != "default":
        raise ValueError("tenant_id: there are no tenants here")
    if str(config.get("enable_ssd_offload", "")).lower() in ("1", "true"):
        log.warning("store_setting_ignored", setting="enable_ssd_offload")
    for name, value in config.items():
        if isinstance(value, str) and value.strip().endswith("%"):
            raise ValueError(f"{name} {value!r}: there is nothing here that it could be a share of; give bytes")
    known = {each.name: each for each in fields(ClientSettings)}
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if name in known:
            settings[name] = _parse(name, known[name].default, value)
        elif name not in IGNORED_SETTINGS:
            raise ValueError(f"{name} is no setting")
    for name in KEY_SETTINGS:
        if name not in settings and (given := os.environ.get(f"{KEY_VARIABLES}{name.upper()}")):
            settings[name] = _parse(name, known[name].default, given)
    return hostname, endpoints, ClientSettings(**settings)


def _endpoint(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


def _parse(name: str, default: object, value: object) -> object:
    """`value`, a string or already of the kind of `default`."""
    if isinstance(default, bool):
        words = {"1": True, "true": True, "0": False, "false": False}
        if str(value).lower() not in words:
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return words[str(value).lower()]
    return type(default)(value)  # type: ignore[call-arg]
