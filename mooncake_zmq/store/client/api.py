"""`MooncakeDistributedStore`: the names, signatures and answers of Mooncake's Python store API, over `StoreClient`.

Answers: 0 or a size where it went well; -600 for what cannot be (an empty key or value, a value above the largest size
class, too small a buffer, a key that is another tenant's to change); -704 not found; -200 no room, as everything is leased or
pinned; -707 the put took longer than it may; -800 bytes were damaged under way; -900 no store answered, or this one was closed.
"""

import bisect
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import structlog

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.store import tensors
from mooncake_zmq.store.client.batch import Value
from mooncake_zmq.store.client.client import UNREACHED, StoreClient
from mooncake_zmq.store.client.device_memory import DeviceMemory, NotOurs
from mooncake_zmq.store.client.peer import ClientSettings
from mooncake_zmq.store.client.replicas import Descriptor, MemoryDescriptor, ReplicaDescriptor, ReplicateConfig
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.memory import Buffer, address_of, new_bytes
from mooncake_zmq.transfer.hashed_copy import Span

log = structlog.get_logger()

INVALID = int(Code.INVALID)
NOT_FOUND = int(Code.NOT_FOUND)
MAX_PATTERN_LENGTH = 1024
NOWHERE: Sequence[str] = ()
KEY_SETTINGS = ("keys", "key_name", "allow_plain_tcp")
KEY_VARIABLES = "MOONCAKE_ZMQ_STORE_"
"""Before the name of one of KEY_SETTINGS, for connectors that pass no settings of ours on."""
IGNORED_SETTINGS = frozenset(
    ("metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices", "ipc_socket_path")
    + ("engine", "enable_ssd_offload", "ssd_offload_path", "enable_client_http_server", "client_http_port")
)
"""Of Mooncake's setup: memory, disks and transports are the cache-nodes' own affair here."""
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


class MooncakeDistributedStore:
    """A client of the stores of one or several cache-nodes. Thread-safe. No call hangs, before `setup` or after `close`."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None
        self._hostname = ""
        self._lock = threading.Lock()
        self._buffers: list[tuple[int, int]] = []
        """Registered (start, stop) addresses, in order."""
        self._device = DeviceMemory()

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
            self._buffers.clear()
        if client is not None:
            client.close()
        return 0

    def health_check(self) -> int:
        """0 if a store answers."""
        client = self._client
        return 0 if client is not None and client.exist(["health"])[0] != -1 else UNREACHED

    def get_hostname(self) -> str:
        """The name of the store that is asked first, as replica descriptors tell it."""
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
        try:
            self._device.admit(buffer_ptr, size)
        except NotOurs as error:
            log.error("store_buffer_refused", reason=str(error))
            return INVALID
        with self._lock:
            at = bisect.bisect_left(self._buffers, (buffer_ptr, 0))
            if any(start < buffer_ptr + size and buffer_ptr < stop for start, stop in self._buffers[max(0, at - 1) : at + 1]):
                return INVALID
            self._buffers.insert(at, (buffer_ptr, buffer_ptr + size))
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        if self._client is None:
            return UNREACHED
        with self._lock:
            for index, (start, _) in enumerate(self._buffers):
                if start == buffer_ptr:
                    del self._buffers[index]
                    self._device.forget(buffer_ptr)
                    return 0
        return INVALID

    # --- puts

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """0 also if the key has a value, which stays."""
        return self._put([key], [_spans(value)], config)[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None) -> int:
        """0, or the code of the first key that failed."""
        return _first_error(self._put(keys, [_spans(value) for value in values], config))

    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """One value of all parts, in order."""
        return self._put([key], [_join(parts)], config)[0]

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self._put([key], [[(buffer_ptr, size)]], config)[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._put_from(keys, buffer_ptrs, sizes, config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Each value lies in several buffers, one part after another."""
        values = _zip_spans(keys, all_buffer_ptrs, all_sizes)
        return [INVALID] * len(keys) if values is None else self._put(keys, values, config)

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Store a value whether or not the key has one; readers see the old or the new one."""
        return self._put([key], [_spans(value)], config, Pin.UPSERT)[0]

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None) -> int:
        return _first_error(self._put(keys, [_spans(value) for value in values], config, Pin.UPSERT))

    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        return self._put([key], [_join(parts)], config, Pin.UPSERT)[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self._put([key], [[(buffer_ptr, size)]], config, Pin.UPSERT)[0]

    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._put_from(keys, buffer_ptrs, sizes, config, Pin.UPSERT)

    # --- gets

    def get(self, key: str) -> bytes:
        """b"" if it is not here."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        values = self._get(keys, new_bytes)
        return [b"" if value is None else value for value in values]

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        return self._get(keys, BufferHandle)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """The value's size; -600 if the buffer is smaller, and then nothing is written."""
        return self._get_into([key], [[(buffer_ptr, size)]])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        return self._get_into(keys, [[span] for span in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Each value fills several buffers, one part after another."""
        places = _zip_spans(keys, all_buffer_ptrs, all_sizes)
        return [INVALID] * len(keys) if places is None else self._get_into(keys, places)

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
        return [self._get_ranges(*row) for row in zip(*rows, strict=True)]

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
        return self._put(keys, [[] if each is None else each.spans for each in encoded], config)

    def get_tensor(self, key: str) -> Any:
        """What `put_tensor` was given, in host memory; None if it is not here or no tensor."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        found: list[Any] = []
        for key, value in zip(keys, self._get(keys, bytearray), strict=True):
            try:
                found.append(None if value is None else tensors.decode(value))
            except tensors.NotATensor as error:
                log.warning("store_tensor_refused", key=key, reason=str(error))
                found.append(None)
        return found

    # --- questions and removal

    def is_exist(self, key: str) -> int:
        """1, 0, or -1 if no store answers."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        client = self._client
        return [-1] * len(keys) if client is None else client.exist(keys)

    def get_size(self, key: str) -> int:
        client = self._client
        return UNREACHED if client is None else client.sizes([key])[0]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The copies of each key that has one."""
        client = self._client
        found = client.locate(keys) if client is not None else []
        return {
            key: [ReplicaDescriptor(MemoryDescriptor(Descriptor(size, name))) for name, size in copies]
            for key, copies in zip(keys, found, strict=False)
            if copies
        }

    def remove(self, key: str, force: bool = False) -> int:
        """Nobody finds the key any more; who reads it may finish, so that `force` changes nothing."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        client = self._client
        return [UNREACHED] * len(keys) if client is None else client.remove(keys)

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Forget the copies in the store of that name, as `get_hostname` or a replica descriptor tells it, or in all; the keys
        that had one. Who reads may finish."""
        client = self._client
        codes = [] if client is None else client.remove(keys, segment_name)
        return [key for key, code in zip(keys, codes, strict=False) if code == 0]

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys went; -600 for a bad pattern. Matched here: a costly pattern is the caller's own time."""
        client = self._client
        if client is None:
            return UNREACHED
        try:
            pattern = re.compile(regex_pattern)
        except re.error:
            return INVALID
        if len(regex_pattern) > MAX_PATTERN_LENGTH:
            return INVALID
        matching = list(dict.fromkeys(key for key in client.list_keys() if pattern.search(key)))
        return sum(code == 0 for code in client.remove(matching))

    def remove_all(self, force: bool = False) -> int:
        """How many copies went."""
        client = self._client
        return UNREACHED if client is None else client.remove_all()

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in UNSUPPORTED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"MooncakeDistributedStore.{name}")

        return refuse

    # --- inside

    def _put(
        self, keys: Sequence[str], values: Sequence[Value], config: ReplicateConfig | None, pins: Pin = Pin.NONE
    ) -> list[int]:
        replicas, preferred, is_consistent = 1, NOWHERE, True
        if config is not None:
            replicas, preferred, is_consistent = config.replica_num, config.preferred, config.is_consistent
            pins |= config.pins
        client = self._client
        if client is None:
            return [UNREACHED] * len(keys)
        if len(keys) != len(values) or replicas < 1 or not is_consistent or self._device.refuses(values):
            return [INVALID] * max(1, len(keys))

        def put(some: Sequence[int], of_some: Sequence[Value]) -> list[int]:
            return client.put([keys[index] for index in some], of_some, pins, replicas=replicas, preferred=preferred)

        return self._device.put(values, put) if self._device.holds(values) else put(range(len(keys)), values)

    def _put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        pins: Pin = Pin.NONE,
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        return self._put(keys, [[span] for span in zip(buffer_ptrs, sizes, strict=True)], config, pins)

    def _get(self, keys: Sequence[str], allocate: Callable[[int], Any]) -> list[Any]:
        """What `allocate` made and the store filled; None for what did not come."""
        client = self._client
        if client is None:
            return [None] * len(keys)
        made: dict[int, Any] = {}

        def place(index: int, size: int) -> Value:
            made[index] = allocate(size)
            return _spans(made[index])

        sizes = client.fetch(keys, place)
        return [made[index] if size > 0 else None for index, size in enumerate(sizes)]

    def _get_into(self, keys: Sequence[str], places: Sequence[Value]) -> list[int]:
        client = self._client
        if client is None:
            return [UNREACHED] * len(keys)
        if self._device.refuses(places):
            return [INVALID] * len(keys)

        def fetch(some: Sequence[int], of_some: Sequence[Value]) -> list[int]:
            caps = [sum(length for _, length in spans) for spans in of_some]
            named = [keys[index] for index in some]
            return client.fetch(named, lambda index, size: of_some[index] if size <= caps[index] else None, caps)

        return self._device.fetch(places, fetch) if self._device.holds(places) else fetch(range(len(keys)), places)

    def _get_ranges(
        self,
        buffer_ptr: int,
        keys: Sequence[str],
        to: Sequence[Sequence[int]],
        of: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Of one buffer."""
        if len({len(keys), len(to), len(of), len(sizes)}) > 1:
            return [[INVALID] * len(each) for each in sizes]
        results: list[list[int]] = []
        for key, *parts in zip(keys, to, of, sizes, strict=True):
            if len(set(map(len, parts))) > 1:
                results.append([INVALID] * len(parts[2]))
                continue
            value = self._get([key], bytearray)[0]
            code = NOT_FOUND if self._client is not None else UNREACHED
            found = [code] * len(parts[2]) if value is None else self._copy_parts(value, buffer_ptr, *parts)
            results.append(found)
        return results

    def _room_at(self, address: int) -> float:
        """Bytes from there to the end of the registered buffer that it lies in; infinite if it lies in none."""
        with self._lock:
            at = bisect.bisect_right(self._buffers, (address, math.inf))
            stop = self._buffers[at - 1][1] if at else 0
        return stop - address if address < stop else math.inf

    def _copy_parts(
        self, value: bytearray, buffer_ptr: int, to: Sequence[int], of: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        found, room = [], self._room_at(buffer_ptr)
        for target, start, size in zip(to, of, sizes, strict=True):
            fits = target >= 0 and start >= 0 and 0 <= size <= min(len(value) - start, room - target)
            fits = fits and not self._device.refuses([[(buffer_ptr + target, size)]])
            if fits and size:
                self._device.copy(buffer_ptr + target, address_of(value) + start, size)
            found.append(size if fits else INVALID)
        return found


def _spans(value: Buffer) -> list[Span]:
    size = len(value) if isinstance(value, bytes | bytearray) else memoryview(value).nbytes
    return [(address_of(value), size)] if size else []


def _join(parts: Sequence[Buffer]) -> list[Span]:
    return [span for part in parts for span in _spans(part)]


def _zip_spans(
    keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> list[list[Span]] | None:
    """None where the lengths of the lists do not agree."""
    if not len(keys) == len(pointers) == len(sizes) or any(map(_differ, pointers, sizes)):
        return None
    return [list(zip(*columns, strict=True)) for columns in zip(pointers, sizes, strict=True)]


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) != len(other)


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
        if name not in settings and (told := os.environ.get(f"{KEY_VARIABLES}{name.upper()}")):
            settings[name] = _parse(name, known[name].default, told)
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
