"""The answers that a gateway has given before, by what was asked, with a bound on the share of wrong ones. PURE.

This is approximate-key caching with auto-refresh (arXiv 2112.06671). Of `interval` + 1 hits one is verified, as drawn: an
engine answers it, and the stored answer is compared. `interval` grows with each verification that agrees and begins at 1 again
after one that does not, whose fresh answer is stored.

A verified hit stands for the `interval` hits that were served at the same odds, whatever came before and comes after it: the
weighted share of wrong ones estimates the share of wrong answers among those that were served, whether they are wrong because
two prompts with one key have different answers or because the answer has changed. Wilson's upper bound on it, for as many equal
samples as the weights are worth (Kish), decides whether a class of prompts is open. A class without evidence is closed. A
closed one goes on as if it were open, but an engine answers in place of the table, and shows for each hit whether the table had
been right; it opens once the bound permits.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import TypeVar

from mooncake_zmq.gateway.requests.client_events import ClientOutput, Finished, TokenOut
from mooncake_zmq.gateway.settings import AnswersSettings
from mooncake_zmq.kv.block_hash import unpack_tokens

ResultT = TypeVar("ResultT")

CLASSES = 16
"""Classes of a tenant's prompts: those with the same model and system prompt are in one, others may be in it too."""
Z = 1.96
"""The bound lies above the true share in 97.5 of 100 cases, at one look; it is looked at after each comparison."""
WINDOW = 4096
"""Comparisons that count; with as many again, the sums are halved."""
ENTRY_BYTES = 1024
"""Bytes that an entry takes beside its tokens, about."""
TENANT_SHARE = 2
"""Divisor of the limits for one tenant: it may have half."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and all else that decides its answer. `group`: its class; `room`: the most tokens that an answer may have."""

    tenant: str
    model: str
    key: bytes
    group: int = 0
    room: int = 1 << 31


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Two are the same if their tokens (int32 bytes) and the reason of their end are."""

    tokens: bytes
    reason: str
    end: Finished = field(compare=False)

    @property
    def version(self) -> str:
        """The version of the weights that made its last token; empty where no engine names one."""
        return self.end.versions[-1][0] or "" if self.end.versions else ""


@dataclass(slots=True)
class Stored:
    """An answer that was given before. `verified_at`: when an engine gave it last, in seconds since 1970; `interval`: the hits
    for which a verified one stands."""

    answer: Answer
    verified_at: float
    interval: float = 1.0

    @property
    def outputs(self) -> list[ClientOutput]:
        """The outputs of the actor that make this answer."""
        tokens = unpack_tokens(self.answer.tokens)
        return [*(TokenOut(index, token) for index, token in enumerate(tokens)), self.answer.end]

    @property
    def size_bytes(self) -> int:
        """The bytes that count for it."""
        return ENTRY_BYTES + len(self.answer.tokens)


@dataclass(frozen=True, slots=True)
class Question:
    """A question that an engine is to answer. `stored`: the answer that it is compared with; `interval`: that of the hit, if it
    verifies; 0: the class is closed, and what is stored stays."""

    asked: Asked
    stored: Answer | None = None
    interval: float = 0.0


class AnswerClass:
    """The comparisons of one class of prompts."""

    def __init__(self, max_error: float) -> None:
        self._max_error = max_error
        self._weight = self._wrong = self._squares = 0.0
        self._count = 0
        self.is_open = max_error >= 1.0

    def note(self, weight: float, *, wrong: bool) -> None:
        """Count a comparison that stands for `weight` hits."""
        if self._count >= 2 * WINDOW:
            self._weight, self._wrong, self._squares = self._weight / 2, self._wrong / 2, self._squares / 2
            self._count //= 2
        self._count += 1
        self._weight += weight
        self._squares += weight * weight
        self._wrong += weight * wrong
        self.is_open = self.bound <= self._max_error

    @property
    def error(self) -> float:
        """The estimated share of wrong answers among those that are served; 0 without evidence."""
        return self._wrong / self._weight if self._weight else 0.0

    @property
    def bound(self) -> float:
        """The upper bound on it; 1 without evidence."""
        return wilson_upper(self.error, self._weight**2 / self._squares) if self._squares else 1.0


class AnswerTable:
    """The stored answers of all tenants, least recently used first. Over its own limit a tenant loses its oldest; over that of
    the table, the tenant with the most bytes does."""

    def __init__(self, settings: AnswersSettings, draw: Callable[[], float]) -> None:
        """`draw`: returns a number from 0 to below 1, evenly distributed."""
        self.settings = settings
        self._draw = draw
        self._tenants: dict[str, _OfTenant] = {}
        self._versions: dict[str, str] = {}
        """The latest version of each model's weights, as engines named it."""
        self.counts: dict[str, float] = {}
        """How questions were answered, and how verifications ended."""

    def look_up(self, asked: Asked) -> Stored | Question:
        """Return the stored answer, or the question that an engine is to answer."""
        tenant = self._tenant(asked)
        stored = tenant.find(asked)
        if stored is None or stored.answer.version != self._versions.get(asked.model, stored.answer.version):
            return self._count("misses", Question(asked))
        if self._draw() * (stored.interval + 1) < 1:
            return self._count("verifications", Question(asked, stored.answer, stored.interval))
        if not tenant.classes[asked.group].is_open:
            return self._count("withheld", Question(asked, stored.answer))
        return self._count("hits", stored)

    def settle(self, question: Question, fresh: Answer, now: float) -> None:
        """Take an engine's complete answer, which is stored. `now`: seconds since 1970."""
        asked, interval = question.asked, 1.0
        tenant = self._tenant(asked)
        self._versions[asked.model] = fresh.version
        if question.stored is not None:
            is_wrong = question.stored != fresh
            self._note(tenant.classes[asked.group], question.interval, wrong=is_wrong)
            if not question.interval:
                return
            if not is_wrong:
                interval = min(question.interval * self.settings.interval_growth, self.settings.max_interval)
        tenant.put(asked, Stored(fresh, now, interval))
        self._make_room(tenant)

    def _note(self, group: AnswerClass, interval: float, *, wrong: bool) -> None:
        """Count a comparison: hits that an open class served, for which a verified one stands, or one that a closed class would
        have served."""
        if wrong:
            self._count("wrong", None)
        if group.is_open == bool(interval):
            group.note(interval or 1.0, wrong=wrong)

    def gauges(self) -> dict[str, float]:
        """Return levels: entries, bytes, closed classes among those that were compared, the largest estimated error."""
        tenants = self._tenants.values()
        classes = [each for tenant in tenants for each in tenant.classes if each.bound < 1.0]
        return {
            "entries": sum(len(tenant.entries) for tenant in tenants),
            "bytes": sum(tenant.size_bytes for tenant in tenants),
            "closed_classes": sum(not each.is_open for each in classes),
            "estimated_error": max((each.error for each in classes), default=0.0),
        }

    def check(self) -> None:
        """Assert what always holds."""
        sizes = [(len(tenant.entries), tenant.size_bytes) for tenant in self._tenants.values()]
        for tenant in self._tenants.values():
            assert tenant.size_bytes == sum(stored.size_bytes for stored in tenant.entries.values())
        for limits, held in ((1, [(sum(each) for each in zip(*sizes, strict=True))] if sizes else []), (TENANT_SHARE, sizes)):
            for entries, size_bytes in held:
                assert entries <= self.settings.max_entries // limits
                assert size_bytes <= self.settings.max_bytes // limits

    def _tenant(self, asked: Asked) -> "_OfTenant":
        tenant = self._tenants.get(asked.tenant)
        if tenant is None:
            tenant = self._tenants[asked.tenant] = _OfTenant(self.settings.max_error)
        return tenant

    def _make_room(self, tenant: "_OfTenant") -> None:
        entries, size_bytes = self.settings.max_entries, self.settings.max_bytes
        while len(tenant.entries) > entries // TENANT_SHARE or tenant.size_bytes > size_bytes // TENANT_SHARE:
            tenant.evict()
        tenants = self._tenants.values()
        while sum(len(each.entries) for each in tenants) > entries or sum(each.size_bytes for each in tenants) > size_bytes:
            max(tenants, key=lambda each: each.size_bytes).evict()

    def _count(self, name: str, result: ResultT) -> ResultT:
        self.counts[name] = self.counts.get(name, 0) + 1
        return result


class _OfTenant:
    def __init__(self, max_error: float) -> None:
        self.entries: OrderedDict[bytes, Stored] = OrderedDict()
        self.size_bytes = 0
        self.classes = [AnswerClass(max_error) for _ in range(CLASSES)]

    def find(self, asked: Asked) -> Stored | None:
        """Return the stored answer, if there is one that fits."""
        stored = self.entries.get(asked.key)
        if stored is None or len(stored.answer.tokens) > 4 * asked.room:
            return None
        self.entries.move_to_end(asked.key)
        return stored

    def put(self, asked: Asked, stored: Stored) -> None:
        before = self.entries.pop(asked.key, None)
        self.entries[asked.key] = stored
        self.size_bytes += stored.size_bytes - (before.size_bytes if before is not None else 0)

    def evict(self) -> None:
        _, stored = self.entries.popitem(last=False)
        self.size_bytes -= stored.size_bytes


def wilson_upper(share: float, samples: float) -> float:
    """Return Wilson's upper bound on a share that was seen in so many samples."""
    z2 = Z * Z
    middle = share + z2 / (2 * samples)
    spread = Z * sqrt((share * (1 - share) + z2 / (4 * samples)) / samples)
    return (middle + spread) / (1 + z2 / samples)
