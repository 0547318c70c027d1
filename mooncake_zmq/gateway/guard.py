"""Who calls, and whether he may: API keys at the gateway's door, and what each call takes of its tenant's share.

Without keys everybody may everything. What load balancers look at needs none ever; metrics need an admin's.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

from mooncake_zmq.gateway.openai import RequestError
from mooncake_zmq.gateway.requests import ClientRequest
from mooncake_zmq.gateway.tenants import Tenant, Tenants

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/ping", "/live"))
ADMIN_PATHS = frozenset(("/metrics",))
MAX_KEY_BYTES = 256


def tenant_at(tenants: Tenants | None, path: str, authorization: bytes) -> Tenant | None:
    """Who calls; None where nobody has to say. Raises RequestError."""
    if tenants is None or path in OPEN_PATHS:
        return None
    scheme, _, secret = authorization.strip().partition(b" ")
    if scheme.lower() != b"bearer" or not 0 < len(secret) <= MAX_KEY_BYTES:
        text = "You didn't provide an API key: it goes into the header Authorization, as Bearer YOUR_KEY"
        raise RequestError(401, text, code="invalid_api_key")
    tenant = tenants.of(secret.strip().decode("latin-1"))
    if tenant is None:
        raise RequestError(401, "Incorrect API key provided", code="invalid_api_key")
    if path in ADMIN_PATHS and tenant.role != "admin":
        raise RequestError(403, f"{path} is for keys with role=admin", code="insufficient_permissions")
    return tenant


class Usage:
    """What one call takes of its tenant's rates and slots; leaving it gives back what was not used. Raises Limited."""

    def __init__(self, tenants: Tenants | None, tenant: Tenant | None, clock: Callable[[], float]) -> None:
        self._tenants, self._tenant, self._clock = tenants, tenant, clock
        self._slots = self._tokens = 0
        self.tokens_used = 0
        """Of prompts and answers, once the call is over."""

    def __enter__(self) -> "Usage":
        if self._tenants is not None and self._tenant is not None:
            self._tenants.begin(self._clock(), self._tenant)
        return self

    def take(self, requests: Sequence[ClientRequest]) -> None:
        """For requests that are about to begin."""
        if self._tenants is None or self._tenant is None:
            return
        tokens = sum(len(request.tokens) // 4 + request.stop.max_tokens for request in requests)
        self._tenants.take(self._clock(), self._tenant, len(requests), tokens)
        self._slots, self._tokens = len(requests), tokens

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._slots and self._tenants is not None and self._tenant is not None:
            self._tenants.give_back(self._clock(), self._tenant, self._slots, max(0, self._tokens - self.tokens_used))
