"""How many copies to make and which to keep, and where copies are: the records of Mooncake's store API."""

from dataclasses import dataclass, field
from enum import Enum

from mooncake_zmq.store.codes import Pin


class SoftPinAction(Enum):
    """The effect of a put on the soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(Enum):
    """The state of a copy; only complete ones are ever returned here."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class ObjectDataType(Enum):
    """The kind of a value; a hint that changes nothing here."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


@dataclass(slots=True)
class ReplicateConfig:
    """How to store a value. What no store here can do raises NotImplementedError in the put."""

    replica_num: int = 1
    """Copies, each in another store; fewer where there are fewer stores."""
    with_soft_pin: bool = False
    """Evicted after everything without a pin."""
    with_hard_pin: bool = False
    """Never evicted, only removed."""
    preferred_segment: str = ""
    """Name of the store to write first, as `get_hostname` or a replica descriptor names it."""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    """The store on this host is preferred anyway."""
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    """With a soft pin: 0 is none; any other time is as long as the value exists, as a soft pin only says which value is evicted
    last."""
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None
    """A hint that changes nothing here: each value is evicted by itself."""
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    preferred_nof_segments: list[str] = field(default_factory=list)

    def __setattr__(self, name: str, value: object) -> None:
        """Raises TypeError for a `soft_pin_ttl_ms` that is no time."""
        if name == "soft_pin_ttl_ms" and value is not None and not (isinstance(value, int) and 0 <= value < 1 << 64):
            raise TypeError(f"soft_pin_ttl_ms must be None or a whole number from 0 to 2**64 - 1, not {value!r}")
        object.__setattr__(self, name, value)

    @property
    def is_consistent(self) -> bool:
        """A time without a soft pin to end is refused."""
        return self.soft_pin_ttl_ms is None or self._pins_softly

    @property
    def pins(self) -> Pin:
        """Raises NotImplementedError for what is not supported."""
        for name in ("nof_replica_num", "dfs_replica_num", "preferred_nof_segments"):
            if getattr(self, name):
                raise NotImplementedError(f"ReplicateConfig.{name}")
        soft = self._pins_softly and self.soft_pin_ttl_ms != 0
        return (Pin.SOFT if soft else Pin.NONE) | (Pin.HARD if self.with_hard_pin else Pin.NONE)

    @property
    def _pins_softly(self) -> bool:
        return self.with_soft_pin or self.soft_pin_action is SoftPinAction.ENABLE

    @property
    def preferred(self) -> list[str]:
        return [*([self.preferred_segment] if self.preferred_segment else []), *self.preferred_segments]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`transport_endpoint`: the name of the store that has the copy."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """A copy in a store's memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One complete copy of a value; all are in memory."""

    memory: MemoryDescriptor
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return True

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return self.memory

    def get_disk_descriptor(self) -> None:
        """Raises ValueError: this copy is in memory."""
        raise ValueError("not a disk replica")
