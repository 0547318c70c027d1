"""The errors of any room that are the operator's to fix: a process reports one in one line, and any other with a traceback."""

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.pool.ssd.disk_directory import DiskError
from mooncake_zmq.refused import Refused
from mooncake_zmq.runtime.listening import PortInUse
from mooncake_zmq.transfer.process_lock import ProcessLockError
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.sockets import BadEndpoint


class ServerError(Refused):
    """A vLLM server that differs from the configuration; the text is one line."""


MISTAKES = (
    Refused,
    ProcessLockError,
    SharedMemoryError,
    BadEndpoint,
    KeysError,
    DiskError,
    PortInUse,
)
