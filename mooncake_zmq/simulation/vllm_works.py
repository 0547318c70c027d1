"""The works of a simulated foreign engine (a vLLM), and the blocks that it saves in stores and loads from them."""

import hashlib
from collections.abc import Generator, Sequence
from itertools import accumulate, chain

import numpy as np

from mooncake_zmq.core.messages import Embedding
from mooncake_zmq.core.work import (
    Embed,
    Embedded,
    EngineProbed,
    Generate,
    Generated,
    ProbeEngine,
    PromptScoresGenerated,
    ReadTokens,
    TokensGenerated,
    TokensRead,
    WorkFailed,
    WriteChat,
)
from mooncake_zmq.kv.block_hash import Key, pack_tokens
from mooncake_zmq.kv.image_keys import keys_with_images
from mooncake_zmq.simulation.engine import SimSequence, as_tokens, logprob_of
from mooncake_zmq.simulation.engine_store import EngineStore, SavedBlock, block_of, fill
from mooncake_zmq.simulation.engine_works import prompt_scores
from mooncake_zmq.simulation.images import begins_of, shown, text_of, written
from mooncake_zmq.simulation.machine import Machine, Running, Steps
from mooncake_zmq.simulation.models import adapters_of, weights
from mooncake_zmq.simulation.traces import READ_BY

ENGINE_FAILS = 0.05
"""The share of requests that a foreign engine refuses by itself."""
COMING_S, AGAIN_S = 0.2, 0.02
"""The time for which a foreign engine waits for blocks that are being saved, and the time between its looks."""
SAVES_LATE = 15
"""The delay until its blocks are in a store, as a multiple of the time that a copy takes to begin."""
ANSWER_LOSSES = 3
"""The number of failing copies for which a foreign engine loses an answer at one token: an answer has many tokens."""


def version_of(node: str, root: Key) -> str:
    """Return the version of the weights that make a node's tokens of a request with this root: its name, or nothing."""
    return node if node.startswith("vllm") and root[0] >> (ord(node[-1]) % 2) & 1 else ""


def generate(machine: Machine, running: Running, work: Generate) -> Steps:
    """Generate an answer as a foreign engine, with KV of its own; a fault of copies may lose the answer under way.
    Its weights may have a version."""
    hardware, tokens, known = machine.world.hardware, shown(as_tokens(work.tokens), work.images), work.tokens
    left, length = work.stop.max_tokens - work.count, len(tokens)
    if work.adapter and work.adapter not in adapters_of(machine.name, machine.model):
        yield machine.took(hardware.compute_start_s)
        return WorkFailed(f"there is no adapter {work.adapter}")
    sequence = SimSequence(length + left, work.sampling.past(work.tokens), weights((machine.model, work.adapter)))
    start = reused = 0
    if work.prompt_likeliest is None:
        start = reused = yield from _load_saved(machine, work, sequence)
    tokens = tokens[start:]
    took_s = machine.took(hardware.compute_start_s + hardware.compute_token_s * len(tokens))
    if machine.world.random.random() < max(ENGINE_FAILS, machine.world.copy_fail):
        yield took_s
        return WorkFailed("injected failure")
    for made in range(1, left + 1):
        stop = yield machine.wait_for_compute(running, took_s)
        stop = stop or (yield took_s)
        if stop or machine.world.random.random() < machine.world.copy_fail / ANSWER_LOSSES:
            return WorkFailed(stop or "injected failure")
        if work.prompt_likeliest is not None and not start:
            scores = prompt_scores(tokens.tolist(), work.prompt_likeliest)
            machine.progressed(running.work_id, PromptScoresGenerated(1, scores))
        sequence.run(start, tokens)
        _save(machine, work, sequence, known, start)
        start += len(tokens)
        token = sequence.next_token(start, work.sampling)
        logprob = logprob_of(token, start, work.sampling)
        logprobs = () if logprob is None else (logprob,)
        if work.stop.reason(token, work.count + made) is not None:
            version = version_of(machine.name, work.root)
            return Generated((token,), reused, logprobs, ((version, 0),) if version else ())
        machine.progressed(running.work_id, TokensGenerated((token,), logprobs))
        tokens, known = np.array([token], dtype=np.uint32), known + pack_tokens((token,))
        sequence.feed(token, start, work.sampling)
        took_s = machine.took(hardware.step_s + hardware.step_entry_s)
    raise AssertionError("the last token ends an answer")


def embed(machine: Machine, running: Running, work: Embed) -> Steps:
    """Embed texts as a foreign engine, which may fail."""
    hardware = machine.world.hardware
    took_s = machine.took(hardware.compute_start_s + hardware.compute_token_s * (len(work.tokens) // 4))
    if machine.world.random.random() < max(ENGINE_FAILS, machine.world.copy_fail):
        yield took_s
        return WorkFailed("injected failure")
    stop = yield machine.wait_for_compute(running, took_s)
    stop = stop or (yield took_s)
    return WorkFailed(stop) if stop else Embedded(vectors_of(work.tokens, work.embedding, work.root))


def vectors_of(tokens: bytes, embedding: Embedding, root: Key) -> bytes:
    """Return the vectors of texts, which depend on all tokens of a text and on the root."""
    ends = [*accumulate(embedding.lengths)]
    texts = [tokens[4 * (end - length) : 4 * end] for end, length in zip(ends, embedding.lengths, strict=True)]
    return b"".join(hashlib.sha256(root + text).digest()[: 4 * (embedding.dimensions or 8)] for text in texts)


def _load_saved(machine: Machine, work: Generate, sequence: SimSequence) -> Generator[float, str | None, int]:
    """Load the KV of so many tokens from stores. What another engine is still saving is waited for, but not for long."""
    world, size = machine.world, machine.layout.block_tokens
    keys = keys_with_images(work.root, work.tokens, size, begins_of(work.images))[: (len(work.tokens) // 4 - 1) // size]
    coming, until = min(len(keys), work.coming_tokens // size), machine.now + COMING_S
    _look(machine, work)
    found = _saved(machine, keys)
    while len(found) < coming and machine.now < until:
        if (yield AGAIN_S):
            break
        found = _saved(machine, keys)
    if found:
        yield machine.took(world.hardware.network_start_s + world.hardware.network_block_s * len(found))
    seen = text_of(shown(as_tokens(work.tokens), work.images))
    world.watcher.cross_hits.loading(machine.name, (machine.model, work.adapter), seen, found)
    for index, block in enumerate(found):
        fill(sequence, index * size, (index + 1) * size, block.kv)
    return len(found) * size


def _look(machine: Machine, work: Generate) -> None:
    """Report what stands in the stores when an engine looks there."""
    held = chain.from_iterable(store.held() for store in _stores(machine))
    machine.world.watcher.cross_hits.looked((machine.model, work.adapter), work.tokens, held)


def _saved(machine: Machine, keys: Sequence[Key]) -> list[SavedBlock]:
    """Return the leading blocks that answering stores have. A torn copy is noticed."""
    world, found = machine.world, list[SavedBlock]()
    for key in keys:
        held = [block for store in _stores(machine) if (block := store.get(key)) is not None]
        if not held or (world.copy_tear and world.random.random() < world.copy_tear):
            break
        found.append(held[0])
    return found


def _stores(machine: Machine) -> list[EngineStore]:
    """Return the blocks of the stores that answer, the one on this host first."""
    there = [segment for segment in machine.world.segments.values() if segment.engine_store is not None and segment.linked]
    there = [each for each in there if machine.world.reach(machine.name, each.node, each.incarnation) == "yes"]
    nearest = sorted(there, key=lambda each: each.host != machine.host)
    return [each.engine_store for each in nearest if each.engine_store is not None]


def _save(machine: Machine, work: Generate, sequence: SimSequence, known: bytes, start: int) -> None:
    """Save complete blocks in a store after a while, if this process still runs then."""
    size, stop = machine.layout.block_tokens, len(known) // 4 // machine.layout.block_tokens
    if start // size < stop:
        keys = keys_with_images(work.root, known, size, begins_of(work.images))
        seen = text_of(shown(as_tokens(known), work.images))
        computes = machine.model, work.adapter
        blocks = [
            (keys[at], SavedBlock(block_of(sequence, at * size, (at + 1) * size), seen[: 4 * (at + 1) * size], computes))
            for at in range(start // size, stop)
        ]
        machine._later(machine.took(machine.world.hardware.copy_start_s * SAVES_LATE), lambda: _put_in_store(machine, blocks))


def _put_in_store(machine: Machine, blocks: Sequence[tuple[Key, SavedBlock]]) -> None:
    for store in _stores(machine)[:1]:
        for key, block in blocks:
            store.put(key, block)


def probe_engine(machine: Machine, _: Running, work: ProbeEngine) -> Steps:
    yield machine.took(machine.world.hardware.probe_s)
    well = machine.world.random.random() >= max(ENGINE_FAILS, machine.world.copy_fail)
    if not well:
        return EngineProbed(False, "injected failure")
    return EngineProbed(True, "", adapters_of(machine.name, machine.model), READ_BY if work.parsers else None)


def write_chat(machine: Machine, _: Running, work: WriteChat) -> Steps:
    """Write a chat with images as tokens, which may fail."""
    yield machine.took(machine.world.hardware.probe_s)
    if machine.world.random.random() < max(ENGINE_FAILS, machine.world.copy_fail):
        return WorkFailed("injected failure")
    return written(work.chat)


def read_tokens(machine: Machine, _: Running, work: ReadTokens) -> Steps:
    """Read tokens as their places and numbers; the state is the tokens before. A call may fail."""
    yield machine.took(machine.world.hardware.probe_s)
    if machine.world.random.random() < max(ENGINE_FAILS, machine.world.copy_fail):
        return WorkFailed("injected failure")
    return TokensRead(text=read_as(work.tokens, len(work.state) // 4), state=work.state + work.tokens)


def read_as(tokens: bytes, first: int) -> str:
    """Return the text that a foreign engine's parsers read in tokens, of which the first is the answer's token `first`."""
    return "".join(f"{place}:{token} " for place, token in enumerate(as_tokens(tokens).tolist(), first))
