"""A gateway's file of API keys: read when it starts, and whenever it changes. What its lines mean, `gateway.tenants` says."""

from pathlib import Path

import structlog

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.gateway.tenants import Tenant, Tenants, TenantsError, parse
from mooncake_zmq.transfer.key_files import credential, identity_of, read_guarded

log = structlog.get_logger()

CREDENTIAL = "api_keys"
REFRESH_S = 1.0


class ApiKeys:
    """The tenants that a file names."""

    def __init__(self, path: Path, slots: int) -> None:
        """`slots`: the gateway's. Raises KeysError."""
        self._path = path
        self._seen = _identity(path)
        self.tenants = Tenants(read(path), slots)

    def refresh(self) -> None:
        """Follow a change. A file that cannot be followed leaves things as they were."""
        seen = _identity(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            known = read(self._path)
        except KeysError as error:
            log.warning("api_keys_unreadable", reason=str(error))
            return
        self.tenants.replace(known)
        log.info("api_keys_read", path=str(self._path), tenants=len(known))


def api_keys_of(setting: str) -> Path | None:
    """Where they are: `gateway.api_keys`, else the unit's credential; None: there are none, and everybody may call."""
    return Path(setting) if setting else credential(CREDENTIAL)


def read(path: Path) -> tuple[Tenant, ...]:
    """Raises KeysError."""
    try:
        return parse(read_guarded(path))
    except (OSError, KeysError, TenantsError) as error:
        raise KeysError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        return identity_of(path)
    except OSError:
        return None
