"""The tenants of a gateway and their limits: API keys by their hashes, rates by token buckets, shares of the slots. PURE.

A file of keys has one tenant a line: NAME:SHA256[:LIMITS]; empty lines and those that begin with # are ignored. LIMITS are
separated by commas: `requests=N` and `tokens=N` a minute, `share=F` of the gateway's slots, a `role`, `priority=N` as the
earliest that its requests may ask for, `slo=own` where they may name SLOs, and `salt=TEXT`, which separates cached prefixes
from those of an earlier tenant of the same name. Tokens are those of the prompt and of the longest answer asked for; the tokens
that were not generated are returned.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from mooncake_zmq.core.keys import NAME_PATTERN, each_readable
from mooncake_zmq.core.messages import MAX_PRIORITY

Role = Literal["user", "metrics", "admin"]
"""Roles: a user may generate, a collector of metrics may read only those and /health, and an admin may do both."""
SloRight = Literal["", "own"]
MAX_TENANTS = 1024
MINUTE_S = 60.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SALT = re.compile(r"[0-9a-z]{0,32}")


SHARE = 0.5
"""Default limit on the share of a gateway's slots that one tenant may have, so that it never has them all."""
HANGUPS = 20
"""Default limit on the calls a second that a tenant's clients may abandon."""


class TenantsError(ValueError):
    """A line of the file is invalid: the message is one line for the operator."""


class Limited(Exception):
    """A tenant exceeded a limit: HTTP 429. `retry_after_s`: when it may retry; None: unknown, or never so much at once."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant: one line of the file. Rates are per minute, 0 for no limit; `share` is at least one slot. `hangups`: calls a
    second that its clients may abandon, 0 for any number. `priority` and `slo`: rights to favour its requests over others';
    without them in its line it has none. `own_salt`: separates its cached prefixes from those of an earlier tenant of its
    name."""

    name: str
    digest: str
    requests: int = 0
    tokens: int = 0
    hangups: int = HANGUPS
    share: float = SHARE
    role: Role = "user"
    priority: int = 0
    slo: SloRight = ""
    own_salt: str = ""

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name) or not _DIGEST.fullmatch(self.digest):
            raise TenantsError("write NAME:SHA256, the name of a-z, 0-9, '.', '_', '-', the hash of 64 hexadecimal digits")
        if min(self.requests, self.tokens, self.hangups) < 0 or not 0 < self.share <= 1:
            raise TenantsError("requests, tokens and hangups are at least 0, share is above 0 and at most 1")
        if self.role not in get_args(Role):
            raise TenantsError(f"the roles are {', '.join(get_args(Role))}")
        if not -MAX_PRIORITY <= self.priority <= 0:
            raise TenantsError(f"priority is the earliest that may be asked for, from -{MAX_PRIORITY} to 0")
        if self.slo not in get_args(SloRight):
            raise TenantsError("slo is own, where requests may name SLOs, or left out")
        if not _SALT.fullmatch(self.own_salt):
            raise TenantsError("salt is up to 32 of a-z and 0-9")

    def line(self) -> str:
        """Return the tenant's line of a file."""
        limits = [f"requests={self.requests}"] * bool(self.requests) + [f"tokens={self.tokens}"] * bool(self.tokens)
        limits += [f"hangups={self.hangups}"] * (self.hangups != HANGUPS)
        limits += [f"share={self.share:g}"] * (self.share != SHARE) + [f"role={self.role}"] * (self.role != "user")
        limits += [f"priority={self.priority}"] * bool(self.priority) + [f"slo={self.slo}"] * bool(self.slo)
        limits += [f"salt={self.own_salt}"] * bool(self.own_salt)
        return ":".join((self.name, self.digest, *([",".join(limits)] if limits else [])))

    @property
    def right(self) -> tuple[str, str, Role]:
        """Key and role by which a call was admitted: a change of them ends the call, a change of limits does not."""
        return self.name, self.digest, self.role

    def salt(self, wanted: str) -> str:
        """Return the salt of its block keys, so that tenants neither share prefixes nor learn the prompts of others by timing.
        With `own_salt`, this holds for successive tenants of one name too. No name has an @."""
        holder = f"{self.name}@{self.own_salt}" if self.own_salt else self.name
        return f"tenant/{holder}/{wanted}"


def digest_of(secret: str) -> str:
    """Return the stored hash of a key. Keys are random and long, so that a fast hash is safe."""
    return hashlib.sha256(secret.encode()).hexdigest()


def parse(text: str) -> tuple[Tenant, ...]:
    """Parse a file of keys. Raises TenantsError with the number of an invalid line."""
    found: dict[str, Tenant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            try:
                tenant = _tenant(line.strip())
            except ValueError as error:
                raise TenantsError(f"line {number}: {error}") from None
            if found.setdefault(tenant.name, tenant) is not tenant:
                raise TenantsError(f"line {number}: {tenant.name} is there twice")
    if len(found) > MAX_TENANTS:
        raise TenantsError(f"more than {MAX_TENANTS} tenants")
    return tuple(found.values())


def still_in(known: Sequence[Tenant], text: str) -> tuple[Tenant, ...]:
    """Return the known tenants whose key and role are still in an invalid text: keys removed from it are revoked despite its
    errors."""
    left = {each.right for each in each_readable(text, lambda line: (_tenant(line.strip()),))}
    return tuple(each for each in known if each.right in left)


def _tenant(line: str) -> Tenant:
    name, _, rest = line.partition(":")
    digest, _, limits = rest.partition(":")
    given = dict(limit.partition("=")[::2] for limit in limits.split(",") if limit)
    kinds = {
        "requests": int,
        "tokens": int,
        "hangups": int,
        "share": float,
        "role": str,
        "priority": int,
        "slo": str,
        "salt": str,
    }
    if unknown := sorted(given.keys() - kinds.keys()):
        raise TenantsError(f"{unknown[0]} is no limit: there are {', '.join(kinds)}")
    own_salt = given.pop("salt", "")
    converted = {key: kinds[key](value) for key, value in given.items()}
    return Tenant(name=name, digest=digest, own_salt=own_salt, **converted)


@dataclass(slots=True)
class _Bucket:
    """A token bucket with a minute's amount. It refills evenly and may be overdrawn once, so that no call is too large
    forever."""

    left: float
    at: float

    def refill(self, now: float, per_minute: int) -> None:
        self.left = min(per_minute, self.left + (now - self.at) * per_minute / MINUTE_S)
        self.at = now

    def wait_s(self, per_minute: int, wanted: float) -> float:
        """Return the seconds until the bucket has the amount; 0 if it has."""
        return max(0.0, (wanted - self.left) * MINUTE_S / per_minute)


@dataclass(slots=True)
class _Use:
    """A tenant's use since its first call: `calls` and `tokens_used` were served, `limited` calls were refused."""

    requests: _Bucket
    tokens: _Bucket
    left_until: float = -math.inf
    """When its clients may abandon calls again: each abandoned call delays it."""
    slots: int = 0
    preparing: int = 0
    calls: int = 0
    limited: int = 0
    tokens_used: int = 0


class Tenants:
    """The tenants of one gateway and their use."""

    def __init__(self, known: Sequence[Tenant], slots: int) -> None:
        """Hold the known tenants. `slots`: number of the gateway's slots."""
        self._slots = slots
        self.known: Sequence[Tenant] = ()
        self._uses: dict[str, _Use] = {}
        self._open: dict[Callable[[], None], Tenant] = {}
        """Functions that end open calls, with the tenant of each."""
        self.replace(known)

    def replace(self, known: Sequence[Tenant]) -> None:
        """Replace keys and limits. Tenants that stay keep their buckets; open calls end whose key was removed."""
        self.known = known
        rights = {tenant.right for tenant in known}
        for end in [end for end, tenant in self._open.items() if tenant.right not in rights]:
            end()
        names = {tenant.name for tenant in known}
        self._uses = {name: use for name, use in self._uses.items() if name in names or use.slots}

    def of(self, secret: str) -> Tenant | None:
        """Return the tenant of a key, in a time that does not depend on how much of the key is right."""
        digest = digest_of(secret)
        found = None
        for tenant in self.known:
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        return found

    @contextmanager
    def calling(self, tenant: Tenant, end: Callable[[], None]) -> Iterator[None]:
        """Register a call while it is open; `end` is called if its key is removed meanwhile."""
        self._open[end] = tenant
        try:
            yield
        finally:
            del self._open[end]

    def begin(self, now: float, tenant: Tenant) -> None:
        """Count a new call. Raises Limited."""
        use = self._use(now, tenant)
        if tenant.hangups and use.left_until > now:
            use.limited += 1
            text = f"clients of {tenant.name} may leave {tenant.hangups} calls a second before their end"
            raise Limited(text, use.left_until - now)
        if tenant.requests:
            bucket = use.requests
            bucket.refill(now, tenant.requests)
            if wait_s := bucket.wait_s(tenant.requests, 1):
                use.limited += 1
                raise Limited(f"{tenant.name} may make {tenant.requests} calls a minute", wait_s)
            bucket.left -= 1
        use.calls += 1

    def hung_up(self, now: float, tenant: Tenant) -> None:
        """Count a call that its client abandoned after its requests had begun: work was wasted on it."""
        if tenant.hangups:
            use = self._use(now, tenant)
            use.left_until = max(use.left_until, now - 1.0) + 1.0 / tenant.hangups

    def prepare(self, now: float, tenant: Tenant) -> None:
        """Take a slot for the first request of a call, before the call is parsed. Raises Limited."""
        use = self._use(now, tenant)
        self._check_share(use, tenant, 1)
        use.slots += 1
        use.preparing += 1

    def prepared(self, now: float, tenant: Tenant) -> None:
        """Note that a call was parsed or failed to be: its slot stays taken."""
        self._use(now, tenant).preparing -= 1

    def take(self, now: float, tenant: Tenant, slots: int, tokens: int) -> None:
        """Take further slots and the most tokens that a call's requests may use, before they begin. Raises Limited."""
        use = self._use(now, tenant)
        self._check_share(use, tenant, slots)
        if tenant.tokens:
            use.tokens.refill(now, tenant.tokens)
            if wait_s := use.tokens.wait_s(tenant.tokens, min(tokens, tenant.tokens)):
                use.limited += 1
                raise Limited(f"{tenant.name} may use {tenant.tokens} tokens a minute", wait_s)
            use.tokens.left -= tokens
        use.slots += slots

    def give_back(self, now: float, tenant: Tenant, slots: int, tokens: int, used: int = 0) -> None:
        """Return the slots and the unused `tokens` of a call that ended. `used`: number of tokens that it used."""
        use = self._use(now, tenant)
        use.tokens_used += used
        use.slots -= slots
        assert use.slots >= 0
        if tenant.tokens:
            use.tokens.refill(now, tenant.tokens)
            use.tokens.left = min(tenant.tokens, use.tokens.left + tokens)

    @property
    def slots_taken(self) -> int:
        """Slots taken by all tenants: zero when idle."""
        return sum(use.slots for use in self._uses.values())

    def counts(self) -> dict[str, float]:
        """Return counters for metrics, named like an actor's, of the present tenants that have called."""
        values: dict[str, float] = {}
        for name, use in self._uses.items():
            values[f"tenant_calls[tenant={name}]"] = use.calls
            values[f"tenant_limited[tenant={name}]"] = use.limited
            values[f"tenant_tokens[tenant={name}]"] = use.tokens_used
        return values

    def gauges(self) -> dict[str, float]:
        """Return gauges of the same tenants; zero when idle."""
        values: dict[str, float] = {}
        for name, use in self._uses.items():
            values[f"tenant_slots[tenant={name}]"] = use.slots
            values[f"tenant_preparing[tenant={name}]"] = use.preparing
        return values

    def _check_share(self, use: _Use, tenant: Tenant, slots: int) -> None:
        most = max(1, int(self._slots * tenant.share))
        if use.slots + slots > most:
            use.limited += 1
            raise Limited(f"{tenant.name} may have {most} requests open, and these would be {use.slots + slots}", None)

    def _use(self, now: float, tenant: Tenant) -> _Use:
        if tenant.name not in self._uses:
            self._uses[tenant.name] = _Use(_Bucket(tenant.requests, now), _Bucket(tenant.tokens, now))
        return self._uses[tenant.name]
