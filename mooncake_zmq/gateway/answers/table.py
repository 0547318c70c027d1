"""The answers that a gateway has given before, by what was asked, with an estimate of the share of wrong ones. PURE.

This is approximate-key caching with auto-refresh (arXiv 2112.06671). Of `interval` + 1 hits one is verified, as drawn: an
engine answers it, and the stored answer is compared. `interval` grows with each verification that agrees and begins at 1 again
after one that does not, whose fresh answer is stored.

A verified hit stands for the `interval` hits that were served at the same odds, and for those that were served until it was
compared: the weighted share of wrong ones estimates the share of wrong answers among those that were served, whether they are
wrong because two prompts with one key have different answers or because the answer has changed. Wilson's upper bound on it, for
as many equal samples as the weights are worth (Kish), decides whether a class of prompts is open. Of one prompt no more than a
small part of them counts, so that one that is asked often does not open its class for others. A class without evidence is
closed. A closed one goes on as if it were open, but an engine answers in place of the table, and shows for each hit whether the
table had been right; it opens once the bound permits, without the answers that were wrong.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, TypeVar

from mooncake_zmq.gateway.requests.client_events import ClientOutput, Finished, TokenOut
from mooncake_zmq.gateway.settings import AnswersSettings

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
KEY_SHARE = 20
"""Divisor of a class's evidence for one prompt: it gives a twentieth, or `KEY_LEAST`."""
KEY_LEAST = 4.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and all else that decides its answer. `model`: whose weights answer; `group`: its class; `room`: the most tokens
    that an answer may have."""

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
    def version(self) -> str | None:
        """The version of the weights that made it; empty where no engine names one; None: several, or one that is unknown."""
        names = {name for name, _, _ in self.end.versions}
        return "" if not names else names.pop() if len(names) == 1 else None


@dataclass(slots=True, eq=False)
class Stored:
    """An answer that was given before. `verified_at`: when an engine gave it last, in seconds since 1970; `interval`: the hits
    for which a verified one stands."""

    answer: Answer
    verified_at: float
    interval: float = 1.0
    verifying: bool = False
    """Whether a verification of it is under way: there is one at a time."""
    meanwhile: int = 0
    """Hits since that began."""
    is_wrong: bool = False
    """Whether an engine has given another answer: it is not given any more."""
    counted: tuple[int, float] = (0, 0.0)
    """A window of its class, and the weight of its comparisons there."""

    def outputs(self) -> Iterator[ClientOutput]:
        """Yield the outputs of the actor that make this answer."""
        for index, token in enumerate(memoryview(self.answer.tokens).cast("i")):
            yield TokenOut(index, token)
        yield self.answer.end

    @property
    def size_bytes(self) -> int:
        """The bytes that count for it."""
        return ENTRY_BYTES + len(self.answer.tokens)


@dataclass(frozen=True, slots=True)
class Question:
    """A question that an engine is to answer. `version`: that of the weights, as known when it was asked; `stored`: what the
    table had then; `weight`: the hits for which the comparison stands. `kind`: a miss compares nothing, and what is withheld is
    compared and stays."""

    asked: Asked
    version: str = ""
    stored: Stored | None = None
    kind: Literal["misses", "verifications", "withheld"] = "misses"
    weight: float = 0.0


class AnswerClass:
    """The comparisons of one class of prompts."""

    def __init__(self, max_error: float) -> None:
        self._max_error = max_error
        self._weight = self._wrong = 0.0
        """All hits that comparisons stand for."""
        self._even_weight = self._even_wrong = self._squares = 0.0
        """The same, but of each prompt only as many as may count for one."""
        self._count = self._window = 0
        self.is_open = max_error >= 1.0

    def note(self, stored: Stored, weight: float, *, wrong: bool) -> None:
        """Count a comparison that stands for `weight` hits."""
        if self._count >= 2 * WINDOW:
            self._weight, self._wrong, self._squares = self._weight / 2, self._wrong / 2, self._squares / 2
            self._even_weight, self._even_wrong = self._even_weight / 2, self._even_wrong / 2
            self._count //= 2
            self._window += 1
        window, counted = stored.counted
        counted *= window == self._window
        self._count += 1
        self._weight += weight
        self._wrong += weight * wrong
        if counted <= max(KEY_LEAST, self._even_weight / KEY_SHARE):
            stored.counted = self._window, counted + weight
            self._even_weight += weight
            self._even_wrong += weight * wrong
            self._squares += weight * weight
        self.is_open = self.bound <= self._max_error

    @property
    def error(self) -> float:
        """The estimated share of wrong answers among those that are served; 0 without evidence."""
        return self._wrong / self._weight if self._weight else 0.0

    @property
    def bound(self) -> float:
        """The upper bound on it, and on the share where no prompt counts for more than a part; 1 without evidence."""
        if not self._squares:
            return 1.0
        return wilson_upper(max(self.error, self._even_wrong / self._even_weight), self._even_weight**2 / self._squares)


class AnswerTable:
    """The stored answers of all tenants, least recently used first. Over its own limit a tenant loses its oldest; over one of
    the table, the tenant with the most entries or bytes does."""

    def __init__(self, settings: AnswersSettings, draw: Callable[[], float]) -> None:
        """`draw`: returns a number from 0 to below 1, evenly distributed."""
        self.settings = settings
        self._draw = draw
        self._tenants: dict[str, _OfTenant] = {}
        """Those with an entry."""
        self._entries = self._bytes = 0
        self._versions: dict[str, str] = {}
        """The latest version of each model's weights, as engines named it."""
        self.counts: dict[str, float] = {}
        """How questions were answered, and how verifications ended."""

    def look_up(self, asked: Asked) -> Stored | Question:
        """Return the stored answer, or the question that an engine is to answer; `settle` follows."""
        version, tenant = self.version(asked.model), self._tenants.get(asked.tenant)
        stored = tenant.entries.get(asked.key) if tenant is not None else None
        if tenant is None or stored is None:
            return self._count("misses", Question(asked, version))
        tenant.entries.move_to_end(asked.key)
        is_open = tenant.classes[asked.group].is_open
        if not self._fits(asked, stored) or (stored.is_wrong and is_open):
            return self._count("misses", Question(asked, version, stored))
        if not stored.verifying and self._draw() * (stored.interval + 1) < 1:
            stored.verifying = True
            weight = stored.interval if is_open else 0.0
            return self._count("verifications", Question(asked, version, stored, "verifications", weight))
        if not is_open:
            return self._count("withheld", Question(asked, version, stored, "withheld", 1.0))
        stored.meanwhile += stored.verifying
        return self._count("hits", stored)

    def settle(self, question: Question, fresh: Answer | None, now: float) -> bool:
        """Take an engine's complete answer; None: it gave none. It is stored unless the weights or the entry are others than
        those when it was asked for. Return whether there is an answer now. `now`: seconds since 1970."""
        asked, stored, interval = question.asked, question.stored, 1.0
        if stored is not None and question.kind == "verifications":
            stored.verifying = False
        if fresh is None or not self.renew(asked.model, question.version, fresh.end):
            return False
        if stored is not None and question.kind != "misses" and self._agrees(question, stored, fresh):
            interval = min(stored.interval * self.settings.interval_growth, self.settings.max_interval)
        if question.kind != "withheld" and self._entry(asked) is stored and fresh.version == self.version(asked.model):
            self._put(asked, Stored(fresh, now, interval, counted=(0, 0.0) if stored is None else stored.counted))
        there = self._entry(asked)
        return there is not None and self._fits(asked, there)

    def version(self, model: str) -> str:
        """Return the latest version of a model's weights; empty: no engine has named one."""
        return self._versions.get(model, "")

    def renew(self, model: str, before: str, end: Finished) -> bool:
        """Note the version that an answer's end names, which ends all answers of others, and return True; or False if another
        one than `before`, the latest when the answer began, is known by now."""
        if self.version(model) != before:
            return False
        if end.versions and (latest := end.versions[-1][0]):
            self._versions[model] = latest
        return True

    def gauges(self) -> dict[str, float]:
        """Return levels: entries, bytes, closed classes among those that were compared, the largest estimated error."""
        classes = [each for tenant in self._tenants.values() for each in tenant.classes if each.error or each.bound < 1]
        return {
            "entries": self._entries,
            "bytes": self._bytes,
            "closed_classes": sum(not each.is_open for each in classes),
            "estimated_error": max((each.error for each in classes), default=0.0),
        }

    def check(self) -> None:
        """Assert what always holds."""
        sizes = [(len(tenant.entries), tenant.size_bytes) for tenant in self._tenants.values()]
        for tenant in self._tenants.values():
            assert tenant.size_bytes == sum(stored.size_bytes for stored in tenant.entries.values())
        whole = (self._entries, self._bytes)
        assert whole == (sum(entries for entries, _ in sizes), sum(size_bytes for _, size_bytes in sizes))
        for limits, held in ((1, [whole]), (TENANT_SHARE, sizes)):
            for entries, size_bytes in held:
                assert entries <= self.settings.max_entries // limits
                assert size_bytes <= self.settings.max_bytes // limits
        assert all(entries for entries, _ in sizes)

    def _entry(self, asked: Asked) -> Stored | None:
        tenant = self._tenants.get(asked.tenant)
        return None if tenant is None else tenant.entries.get(asked.key)

    def _fits(self, asked: Asked, stored: Stored) -> bool:
        """Return whether what is stored is of the latest weights and may be given: an end for want of room is that of a certain
        room alone."""
        answer, most = stored.answer, 4 * asked.room
        has_room = len(answer.tokens) == most if answer.reason == "length" else len(answer.tokens) <= most
        return has_room and answer.version == self.version(asked.model)

    def _agrees(self, question: Question, stored: Stored, fresh: Answer) -> bool:
        """Compare what is stored, and count the hits for which the comparison stands: those that were served, or one that a
        closed class would have served."""
        weight = question.weight
        if question.kind == "verifications":
            weight, stored.meanwhile = weight + stored.meanwhile, 0
        if is_wrong := stored.answer != fresh:
            stored.is_wrong = True
            self._count("wrong", None)
        tenant = self._tenants.get(question.asked.tenant)
        if weight and tenant is not None:
            tenant.classes[question.asked.group].note(stored, weight, wrong=is_wrong)
        return not is_wrong

    def _put(self, asked: Asked, stored: Stored) -> None:
        """Store an answer, unless it is larger than all that its tenant may have."""
        limits, name = self.settings, asked.tenant
        if stored.size_bytes > limits.max_bytes // TENANT_SHARE:
            return
        if (tenant := self._tenants.get(name)) is None:
            tenant = self._tenants[name] = _OfTenant(limits.max_error)
        before = tenant.entries.pop(asked.key, None)
        tenant.entries[asked.key] = stored
        self._resize(tenant, before is None, stored.size_bytes - (before.size_bytes if before is not None else 0))
        while len(tenant.entries) > limits.max_entries // TENANT_SHARE or tenant.size_bytes > limits.max_bytes // TENANT_SHARE:
            self._evict(name)
        while self._entries > limits.max_entries:
            self._evict(max(self._tenants, key=lambda each: len(self._tenants[each].entries)))
        while self._bytes > limits.max_bytes:
            self._evict(max(self._tenants, key=lambda each: self._tenants[each].size_bytes))

    def _evict(self, name: str) -> None:
        tenant = self._tenants[name]
        _, stored = tenant.entries.popitem(last=False)
        self._resize(tenant, -1, -stored.size_bytes)
        if not tenant.entries:
            del self._tenants[name]

    def _resize(self, tenant: "_OfTenant", entries: int, size_bytes: int) -> None:
        tenant.size_bytes += size_bytes
        self._entries, self._bytes = self._entries + entries, self._bytes + size_bytes

    def _count(self, name: str, result: ResultT) -> ResultT:
        self.counts[name] = self.counts.get(name, 0) + 1
        return result


class _OfTenant:
    def __init__(self, max_error: float) -> None:
        self.entries: OrderedDict[bytes, Stored] = OrderedDict()
        self.size_bytes = 0
        self.classes = [AnswerClass(max_error) for _ in range(CLASSES)]


def wilson_upper(share: float, samples: float) -> float:
    """Return Wilson's upper bound on a share that was seen in so many samples."""
    z2 = Z * Z
    middle = share + z2 / (2 * samples)
    spread = Z * sqrt((share * (1 - share) + z2 / (4 * samples)) / samples)
    return min(1.0, (middle + spread) / (1 + z2 / samples))
