"""A gateway's file of API keys: read when it starts, and whenever it changes. `gateway.requests.tenants` reads its lines."""

from pathlib import Path

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.gateway.requests.tenants import Tenant, Tenants, TenantsError, parse, still_in
from mooncake_zmq.transfer.key_files import Followed, credential, identity_of, read_guarded

CREDENTIAL = "api_keys"
REFRESH_S = 1.0


class ApiKeys(Followed):
    """The tenants that a file names."""

    EVENTS = ("api_keys_read", "api_keys_unreadable", "api_keys_taken_away")

    def __init__(self, path: Path, slots: int) -> None:
        """`slots`: the gateway's. Raises KeysError."""
        super().__init__(path=path, _seen=_identity(path))
        self.tenants = Tenants(read(path), slots)

    def _take(self, text: str) -> int:
        known = parse(text)
        self.tenants.replace(known)
        return len(known)

    def _take_away(self, text: str) -> int | None:
        left = still_in(self.tenants.known, text)
        if len(left) == len(self.tenants.known):
            return None
        self.tenants.replace(left)
        return len(left)


def api_keys_of(setting: str) -> Path | None:
    """Return the path of the file: `gateway.api_keys`, else the unit's credential; None: there are no keys, and any caller may
    call."""
    return Path(setting) if setting else credential(CREDENTIAL)


def read(path: Path) -> tuple[Tenant, ...]:
    """Read the file. Raises KeysError."""
    return read_with_text(path)[1]


def read_with_text(path: Path) -> tuple[str, tuple[Tenant, ...]]:
    """Read the file; return its text too. Raises KeysError."""
    try:
        text = read_guarded(path)
        return text, parse(text)
    except (OSError, KeysError, TenantsError) as error:
        raise KeysError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        return identity_of(path)
    except OSError:
        return None
