"""Authentication and limits of calls: the tenant of an API key, and what each call takes of that tenant's share.

Without keys `gateway.http.keyless` says who may. With them load balancers need none to learn whether the gateway can serve; how
the cluster is, and metrics, are for keys of the roles `metrics` and `admin`.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

from mooncake_zmq.gateway.http.call_key import secret_in
from mooncake_zmq.gateway.http.calls import HungUp
from mooncake_zmq.gateway.openai.errors import RequestError, quoted
from mooncake_zmq.gateway.requests.client_events import ClientRequest
from mooncake_zmq.gateway.requests.tenants import Tenant, Tenants

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/ping", "/live"))
OPERATORS_PATHS = ("/metrics", "/cluster", "/trace")
ADMINS_PATHS = ("/admin",)
"""Paths for admins. Like those for operators, they include all paths below them."""
REFUSALS_PER_S = 20
LATEST_S = 4.0
"""The longest delay of a refusal: a tenant with 512 connections is refused some 170 times a second at most."""
GOLDEN = (5**0.5 - 1) / 2
"""The step by which any number of points on a circle lie almost evenly (Weyl's sequence of the golden ratio)."""
MAX_REFUSED = 2048
"""Limit on the tenants and addresses that are remembered: more than there are connections."""


def tenant_at(tenants: Tenants | None, path: str, authorization: bytes) -> Tenant | None:
    """Return the tenant that calls; None where no key is needed and none was given. Raises RequestError."""
    if tenants is None:
        return None
    secret = secret_in(authorization)
    tenant = tenants.of(secret) if secret else None
    if path in OPEN_PATHS:
        return tenant
    if not secret:
        text = "You didn't provide an API key: it goes into the header Authorization, as Bearer YOUR_KEY"
        raise RequestError(401, text, code="invalid_api_key")
    if tenant is None:
        raise RequestError(401, "Incorrect API key provided", code="invalid_api_key")
    if is_below(path, ADMINS_PATHS) and tenant.role != "admin":
        raise RequestError(403, f"{quoted(path)} is for keys with role=admin", code="insufficient_permissions")
    if _for_operators(path) and not sees_all(tenants, tenant):
        raise RequestError(403, f"{quoted(path)} is for keys with role=metrics or role=admin", code="insufficient_permissions")
    if not _for_operators(path) and tenant.role == "metrics":
        allowed = ", ".join(("/health", *OPERATORS_PATHS))
        raise RequestError(403, f"a key with role=metrics is for {allowed} alone", code="insufficient_permissions")
    return tenant


def name_of(tenants: Tenants | None, authorization: bytes) -> str:
    """Return the name of the tenant whose key this is; empty if it is none's."""
    secret = secret_in(authorization)
    tenant = tenants.of(secret) if tenants is not None and secret else None
    return "" if tenant is None else tenant.name


def _for_operators(path: str) -> bool:
    return is_below(path, OPERATORS_PATHS)


def is_below(path: str, paths: Sequence[str]) -> bool:
    """Return whether the path is one of these, or below one."""
    return any(path == own or path.startswith(f"{own}/") for own in paths)


def sees_all(tenants: Tenants | None, tenant: Tenant | None) -> bool:
    """Return whether the caller may read the cluster's state and its tenants' use."""
    return tenants is None or (tenant is not None and tenant.role in ("metrics", "admin"))


class Refusals:
    """The delays of refusals, by tenant or by address without a key. A refused call costs the gateway a millisecond too, in
    which others wait; a client that retries at once is refused with a growing delay. The longest delays are spread over the
    second half of `LATEST_S`, as hundreds of calls that came together would otherwise all end, and come again, at once."""

    def __init__(self) -> None:
        self._spread = 0.0
        """Where in their half the latest of the longest delays ended, of 1."""
        self._due: dict[str, float] = {}
        """Time of the latest refusal, by tenant or address, as if refusals were evenly spaced: dropped when it is a second
        old."""

    def delay_s(self, now: float, owner: str) -> float:
        """Return the delay of one more refusal: 0 for the first ones of a second."""
        if len(self._due) >= MAX_REFUSED:
            self._due = {each: due for each, due in self._due.items() if due > now - 1.0}
        due = max(self._due.get(owner, 0.0), now - 1.0) + 1.0 / REFUSALS_PER_S
        self._due[owner] = min(due, now + LATEST_S / 2)
        if due <= now + LATEST_S / 2:
            return max(0.0, due - now)
        self._spread = (self._spread + GOLDEN) % 1.0
        return LATEST_S / 2 * (1.0 + self._spread)


class Usage:
    """The share of its tenant's rates and slots that one call takes; its exit returns what was not used. Raises Limited."""

    def __init__(self, tenants: Tenants | None, tenant: Tenant | None, clock: Callable[[], float]) -> None:
        self._tenants, self._tenant, self._clock = tenants, tenant, clock
        self._slots = self._tokens = 0
        self._preparing = False
        self.has_work = False
        """Whether anything is done for the call beyond the gateway, which is in vain if its client hangs up."""
        self.tokens_used = 0
        """Tokens of prompts and answers, set when the call has ended."""

    def __enter__(self) -> "Usage":
        if self._tenants is not None and self._tenant is not None:
            self._tenants.begin(self._clock(), self._tenant)
        return self

    def prepare(self) -> None:
        """Take a slot for a call whose body is complete, before it is prepared."""
        if self._tenants is not None and self._tenant is not None:
            self._tenants.prepare(self._clock(), self._tenant)
            self._slots, self._preparing = 1, True

    def take(self, requests: Sequence[ClientRequest], each: int = 1) -> None:
        """Take slots and tokens for requests that are about to begin, `each` in a row for one prompt, which is computed
        once."""
        if self._tenants is None or self._tenant is None:
            return
        tokens = sum(len(request.tokens) // 4 for request in requests[::each])
        tokens += sum(request.stop.max_tokens for request in requests)
        self._prepared(self._tenants, self._tenant)
        self._tenants.take(self._clock(), self._tenant, len(requests) - self._slots, tokens)
        self._slots, self._tokens, self.has_work = len(requests), tokens, True

    def _prepared(self, tenants: Tenants, tenant: Tenant) -> None:
        if self._preparing:
            tenants.prepared(self._clock(), tenant)
        self._preparing = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.has_work and isinstance(error, HungUp) and self._tenants is not None and self._tenant is not None:
            self._tenants.hung_up(self._clock(), self._tenant)
        if self._slots and self._tenants is not None and self._tenant is not None:
            self._prepared(self._tenants, self._tenant)
            left = max(0, self._tokens - self.tokens_used)
            self._tenants.give_back(self._clock(), self._tenant, self._slots, left, self.tokens_used)
