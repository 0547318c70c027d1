"""The workload of a seed: chats whose next turn extends prompt and answer, shared system prefixes, bursts of prompts that begin
alike, hang-ups, tenants."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

import numpy as np
from msgspec import structs

from mooncake_zmq.core.messages import Embedding, Eviction, Image, Parsers, Sampling, StopRule
from mooncake_zmq.core.selection import SINKS
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Reading
from mooncake_zmq.kv.block_hash import Key, extend_keys, namespace, pack_tokens
from mooncake_zmq.kv.image_keys import keys_with_images
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.simulation.engine import EOS_IDS, VOCABULARY, SimSequence
from mooncake_zmq.simulation.images import begins_of, image_in, shown
from mooncake_zmq.simulation.models import MODEL, Computes, weights

READ_BY = Parsers(calls=True, reasoning=True)
"""Parsers of all vLLMs."""
CONSTRAINTS = (b"", b"3", b"", b"58")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The amount and sizes of a seed's requests. Times in virtual seconds, lengths in tokens."""

    requests: int = 40
    window_s: float = 5.0
    max_turns: int = 4
    system_prompts: int = 3
    max_system: int = 40
    max_question: int = 32
    min_answer: int = 1
    max_answer: int = 28
    cancel_share: float = 0.12
    max_choices: int = 4
    choices_share: float = 0.25
    scored_share: float = 0.1
    think_s: float = 0.6
    burst_share: float = 0.1
    """The share of chats that begin a burst of chats of one turn each, whose prompts share a beginning of their own."""
    max_burst: int = 5
    max_burst_prefix: int = 72
    max_burst_gap_s: float = 0.1
    starts_at: float = 0.0
    tenants: tuple[str, ...] = ("", "red", "blue")
    repeats: bool = False
    """Whether most questions repeat a part of a prompt of the same tenant from before, at another place."""
    plain: bool = False
    """Whether to ask for nothing that vLLMs do not support."""
    computes: tuple[Computes, ...] = (("", ""),)
    """The models and adapters that chats ask for."""
    evicts: bool = False
    """Whether some ask that their decode holds fewer tokens of the prompt."""

    def computes_for(self, prompt: Sequence[int]) -> Computes:
        """Return the model and the adapter that a chat with this first prompt asks for."""
        return self.computes[sum(prompt) % len(self.computes)]

    def root(self, layout: BlockLayout, tenant: str, computes: Computes = ("", "")) -> bytes:
        """Return the namespace after which the prompts of a tenant begin."""
        model, adapter = computes
        return namespace(model=model or MODEL, layout=layout.fingerprint, salt=tenant, adapter=adapter)

    def roots(self, layout: BlockLayout) -> tuple[bytes, ...]:
        """Return the namespaces of all tenants, of each model and adapter."""
        return tuple(self.root(layout, *each) for each in product(self.tenants, dict.fromkeys(self.computes)))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of an undisturbed run with a seed, and why it ends."""

    seed: int
    tokens: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and its answers: the first, with which the chat goes on, and perhaps more."""

    request: ClientRequest
    answers: tuple[Answer, ...]
    think_s: float
    cancel_after_s: float | None
    cancel_after_tokens: int | None
    cancel_alone: bool
    """The first answer alone is cancelled after so many tokens."""

    @property
    def answer(self) -> tuple[int, ...]:
        """Return the first answer."""
        return self.answers[0].tokens


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns of one conversation, each after the one before it ended."""

    number: int
    starts_at: float
    turns: tuple[Turn, ...]


@dataclass(slots=True)
class Trace:
    """All chats of a seed, and the bytes of every block that a key can stand for."""

    chats: tuple[Chat, ...]
    blocks: dict[Key, bytes] = field(default_factory=dict)
    owners: dict[Key, str] = field(default_factory=dict)
    """The tenant of each key."""
    texts: dict[str, list[int]] = field(default_factory=dict)
    """A prompt and answer of each tenant."""


def generate(random: Random, workload: Workload, layout: BlockLayout, blocks: dict[Key, bytes] | None = None) -> Trace:
    """Draw the chats and compute what the undisturbed engine answers; `blocks` are those known from another trace."""
    trace = Trace((), {} if blocks is None else blocks)
    systems = [_tokens(random, random.randint(1, workload.max_system)) for _ in range(workload.system_prompts)]
    chats: list[Chat] = []
    left = workload.requests
    while left:
        starts_at = workload.starts_at + random.uniform(0, workload.window_s)
        tenant = random.choice(workload.tenants)
        if left > 1 and random.random() < workload.burst_share:
            members = min(left, random.randint(2, workload.max_burst))
            prefix = _tokens(random, random.randint(1, workload.max_burst_prefix))
            for _ in range(members):
                chats.append(Chat(len(chats), starts_at, _turns(random, workload, layout, trace, tenant, prefix, 1)))
                starts_at += random.uniform(0, workload.max_burst_gap_s)
            left -= members
            continue
        turns = min(left, random.randint(1, workload.max_turns))
        left -= turns
        prompt = random.choice(systems) if random.random() < 0.8 else []
        chats.append(Chat(len(chats), starts_at, _turns(random, workload, layout, trace, tenant, prompt, turns)))
    trace.chats = tuple(chats)
    return trace


def _turns(
    random: Random, workload: Workload, layout: BlockLayout, trace: Trace, tenant: str, before: list[int], count: int
) -> tuple[Turn, ...]:
    """Draw so many turns of a chat of `tenant` whose prompts begin with `before`."""
    prompt = list(before)
    turns: list[Turn] = []
    for _ in range(count):
        question = _tokens(random, _question_length(random, workload, layout, len(prompt)))
        if workload.repeats and len(trace.texts.get(tenant, ())) >= len(question) + len(prompt) % 4:
            question = trace.texts[tenant][len(prompt) % 4 :][: len(question)]
        prompt = prompt + question
        if not turns:
            computes = workload.computes_for(prompt)
            root = workload.root(layout, tenant, computes)
        turn = _turn(random, workload, layout, trace, root, computes, tenant, prompt)
        turns.append(turn)
        for answer in turn.answers:
            whole = pack_tokens(prompt + list(answer.tokens))
            trace.owners |= dict.fromkeys(extend_keys(root, whole, layout.block_tokens), tenant)
        prompt = prompt + list(turn.answer)
        trace.texts[tenant] = prompt
    return tuple(turns)


def _question_length(random: Random, workload: Workload, layout: BlockLayout, so_far: int) -> int:
    """Draw a length: half of the prompts end on, just before or just after a block boundary."""
    length = random.randint(1, workload.max_question)
    if random.random() < 0.5:
        length -= (so_far + length) % layout.block_tokens
        length += random.choice((-1, 0, 1))
    return max(1, length)


LOGPROBS = (None, None, 0, 2)


def _turn(
    random: Random,
    workload: Workload,
    layout: BlockLayout,
    trace: Trace,
    root: bytes,
    computes: Computes,
    tenant: str,
    prompt: list[int],
) -> Turn:
    """Draw a turn of a chat that asks for `computes`."""
    model, adapter = computes
    temperature = random.choice((0.0, 0.0, 0.8))
    sampling = Sampling(
        temperature=temperature,
        seed=random.randrange(1, 1 << 32) if temperature else 0,
        presence_penalty=0.0 if workload.plain else random.choice((0.0, 0.0, 0.5)),
        repetition_penalty=random.choice((1.0, 1.0, 1.1)),
        logprobs=LOGPROBS[len(prompt) % len(LOGPROBS)] if workload.plain else random.choice(LOGPROBS),
        prompt_tokens=len(prompt),
        constraint=b"" if workload.plain else CONSTRAINTS[len(prompt) % len(CONSTRAINTS)],
    )
    stop = _stop(random, workload)
    more = random.randint(1, workload.max_choices - 1) if random.random() < workload.choices_share else 0
    alone = not more
    scores = alone and len(prompt) % 8 == 0 if workload.plain else alone and random.random() < workload.scored_share
    embedding = _embedding(prompt) if workload.plain and alone and not scores else None
    images = image_in(prompt) if workload.plain and alone and not scores and embedding is None else ()
    eviction = _eviction(prompt) if workload.evicts and not scores else None
    answers: list[Answer] = []
    for seed in (sampling.seed, *(random.randrange(1 << 32) for _ in range(more))):
        own = structs.replace(sampling, seed=seed)
        answers.append(
            Answer(seed, *reference(root, prompt, own, stop, layout, trace.blocks, weights(computes), images, eviction))
        )
    length = len(answers[0].tokens)
    if embedding is not None:
        answers, stop = [Answer(sampling.seed, (), "stop")], StopRule(max_tokens=1)
    tokens = pack_tokens(prompt)
    request = ClientRequest(
        tokens=tokens,
        root=root,
        model=model,
        adapter=adapter,
        keys=tuple(keys_with_images(root, tokens, layout.block_tokens, begins_of(images))),
        sampling=sampling,
        stop=stop,
        exact=len(prompt) % 8 == 4 and eviction is None,
        tenant=tenant,
        prompt_logprobs=None if not scores else 1 if workload.plain else random.choice((0, 1)),
        reading=_reading(prompt) if workload.plain and embedding is None else None,
        embedding=embedding,
        images=images,
        eviction=eviction,
    )
    after_s, after_tokens = _cancelled(random, workload, length)
    think_s = random.uniform(0, workload.think_s)
    return Turn(request, tuple(answers), think_s, after_s, after_tokens, cancel_alone=random.random() < 0.5)


def _stop(random: Random, workload: Workload) -> StopRule:
    """Draw when an answer ends."""
    return StopRule(
        max_tokens=random.randint(workload.min_answer, workload.max_answer),
        min_tokens=random.choice((0, 0, 4)),
        eos_ids=random.choice((EOS_IDS, EOS_IDS, ())),
    )


def _cancelled(random: Random, workload: Workload, length: int) -> tuple[float | None, int | None]:
    """Draw when a client cancels its request: after a time, after tokens of `length`, or never."""
    if random.random() >= workload.cancel_share:
        return None, None
    if random.random() < 0.5:
        return random.choice((random.uniform(0, 0.02), random.uniform(0, 1.0))), None
    return None, random.randint(1, length)


def _embedding(prompt: list[int]) -> Embedding | None:
    """Return the texts of a prompt that is embedded, one of seven; it draws nothing."""
    tokens = len(prompt)
    if tokens % 7 != 3:
        return None
    return Embedding((tokens,) if tokens % 2 else (1, tokens - 2, 1), dimensions=0 if tokens % 3 else 4)


def _eviction(prompt: list[int]) -> Eviction | None:
    """Return how few tokens of a prompt a decode holds, of one prompt of five; it draws nothing."""
    tokens = len(prompt)
    if tokens % 5 != 2:
        return None
    eviction = Eviction(kind="recent" if tokens % 2 else "elastic", kept=max(SINKS + 1, tokens // 2))
    return eviction if eviction.fits(tokens) else None


def _reading(prompt: list[int]) -> Reading | None:
    """Return how the answer is read, if vLLMs read it."""
    if len(prompt) % 3 == 0:
        return None
    return Reading(parsers=READ_BY, chat=b"{}", textless=frozenset(EOS_IDS), whole=len(prompt) % 5 == 0)


def reference(
    root: bytes,
    prompt: Iterable[int],
    sampling: Sampling,
    stop: StopRule,
    layout: BlockLayout,
    blocks: dict[Key, bytes],
    computes: str = "",
    images: Sequence[Image] = (),
    eviction: Eviction | None = None,
) -> tuple[tuple[int, ...], str]:
    """Return the undisturbed answer and why it ends; add to `blocks` the bytes of every complete block of the sequence, as it
    is if nothing is evicted. `computes`: see `weights`. `images`: those of the prompt."""
    tokens = list(prompt)
    sequence = SimSequence(len(tokens) + stop.max_tokens, sampling.past(pack_tokens(tokens)), computes)
    sequence.run(0, shown(np.array(tokens, dtype=np.uint32), images))
    prompt_length = len(tokens)
    if eviction is not None:
        sequence.evict(eviction, prompt_length)
    while True:
        token = sequence.next_token(len(tokens), sampling)
        sequence.run(len(tokens), np.array([token], dtype=np.uint32))
        sequence.feed(token, len(tokens), sampling)
        tokens.append(token)
        reason = stop.reason(token, len(tokens) - prompt_length)
        if reason is not None:
            break
    size = layout.block_tokens
    if eviction is not None:
        sequence = SimSequence(len(tokens), b"", computes)
        sequence.run(0, shown(np.array(tokens, dtype=np.uint32), images))
    for index, key in enumerate(keys_with_images(root, pack_tokens(tokens), size, begins_of(images))):
        if key not in blocks:
            start = index * size
            parts = (sequence.read_part(layer, start, start + size, size) for layer in range(layout.layers))
            blocks[key] = b"".join(parts)
    return tuple(tokens[prompt_length:]), reason


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]
