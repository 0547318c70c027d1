"""The live executor with the toy engine: one token of wrong KV anywhere would change what is sampled."""

import errno
import gc
import math
import os
import re
import threading
import time
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec import structs
from segment_bytes import slot_bytes
from waiting import eventually

from mooncake_zmq.core.actor import OpenSequence, WorkDone, WorkProgress
from mooncake_zmq.core.messages import Hello, Sampling, SegmentRef, SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    DecodeStep,
    ForkSequence,
    LayersComputed,
    ProbeProcess,
    ProcessProbed,
    PullBlocks,
    SampleTokens,
    SequenceBlock,
    SequenceForked,
    SlotGrant,
    StepDecoded,
    StepEntry,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.engine import grammars as grammars_module
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.sampling import logprob
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.gateway.openai.constraints import of_lark
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.runtime.executor import compute, jobs, worker
from mooncake_zmq.runtime.executor import loads as loads_module
from mooncake_zmq.runtime.executor.executor import Executor
from mooncake_zmq.runtime.executor.jobs import Job
from mooncake_zmq.runtime.executor.sampler import Sampler
from mooncake_zmq.transfer.block_copy import load_blocks
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.process_lock import ProcessLock

TIMEOUT_S = 20.0
GREEDY = Sampling()
PROMPT = np.arange(3, 3 + 14, dtype=np.int32)  # three blocks of four tokens and a tail of two
STEPS = 6


class Rig:
    """A process without its actor: a segment, an executor, perhaps a data server, and the events in their order."""

    def __init__(
        self, name, segment, crashes, runtime_dir, *, host="here", engine=None, serve=False, cuda=None, shm_dir=None, **options
    ):
        self.name, self.segment, self.host = name, segment, host
        self.events = []
        self.changed = threading.Condition()
        self.next_id = 0
        self.executor = Executor(
            SegmentDirectory(name, 1, host, segment.layout, segment, cuda, shm_dir),
            engine=engine or ToyEngine(),
            runtime_dir=runtime_dir,
            emit=self.emit,
            on_crash=crashes.append,
            **{"progress_s": 0.0, **options},
        )
        self.server = DataServer(segment, "tcp://127.0.0.1:*", on_crash=crashes.append) if serve else None

    def emit(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def hello(self):
        endpoint = self.server.endpoint if self.server else "none"
        ref = SegmentRef(path=str(self.segment.path), endpoint=endpoint, slots=self.segment.slots)
        return Hello(protocol=1, role="prefill", host=self.host, model="m", tokenizer="t", layout="l", segment=ref)

    def meet(self, *others):
        for other in others:
            self.executor.learn_peer(other.name, 1, other.hello())

    def start(self, work, deadline_s=TIMEOUT_S):
        self.next_id += 1
        self.executor.start(self.next_id, work, deadline_s)
        return self.next_id

    def wait_for(self, predicate):
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(predicate, self.events)), TIMEOUT_S)

    def result(self, work_id):
        self.wait_for(lambda event: isinstance(event, WorkDone) and event.work_id == work_id)
        (done,) = (event for event in self.events if isinstance(event, WorkDone) and event.work_id == work_id)
        return done.result

    def run(self, work, deadline_s=TIMEOUT_S):
        return self.result(self.start(work, deadline_s))

    def grants(self, *slots):
        """Reserve slots, as the actor would."""
        made = []
        for slot in slots:
            generation = self.segment.generation(slot) // 2 * 2 + 1
            self.executor.fence([(slot, generation)])
            made.append(SlotGrant(self.name, 1, slot, generation))
        return tuple(made)

    def commit(self, grants, checksums):
        self.executor.fence([(grant.slot, grant.generation + 1) for grant in grants])
        return [
            SlotRef(node=self.name, incarnation=1, slot=grant.slot, generation=grant.generation + 1, checksum=checksum)
            for grant, checksum in zip(grants, checksums, strict=True)
        ]

    def compute(
        self, sequence, start, tokens, *, prefix=(), outputs=(), sampling=None, deadline_s=TIMEOUT_S, prefix_s=TIMEOUT_S
    ):
        work = ComputeChunk(sequence, start, tokens.tobytes(), tuple(prefix), tuple(outputs), sampling, prefix_s)
        return self.start(work, deadline_s)

    def first(self, sequence, tokens, sampling, seeds=()):
        """Compute a prompt: its first token, then one for each of `seeds`, each with its probability."""
        work = ComputeChunk(sequence, 0, tokens.tobytes(), (), (), sampling, seeds=seeds)
        chunk = self.result(self.start(work))
        if isinstance(chunk, WorkFailed):
            return chunk
        if chunk.token is not None:
            return ((chunk.token, chunk.logprob), *chunk.others)
        late = self.run(SampleTokens(sequence))
        return late if isinstance(late, WorkFailed) else late.sampled

    def answer(self, sequence, token, sampling, steps):
        """What so many steps sample behind the first token, however late they know what may come."""
        tokens = [token]
        while len(tokens) <= steps:
            position = len(PROMPT) + len(tokens) - 1
            step = self.run(DecodeStep((StepEntry(sequence, tokens[-1], position, sampling, TIMEOUT_S),)))
            assert not step.sat_out
            assert not step.failed
            tokens.append(step.tokens[0][0])
        return tokens[1:]

    def prefill(self, sequence=1, slots=(0, 1, 2, 3)):
        """Prefill PROMPT in two chunks into `slots`: the references and the first token."""
        self.executor.open_sequence(OpenSequence(sequence, 32))
        grants = self.grants(*slots)
        first = self.result(self.compute(sequence, 0, PROMPT[:8], outputs=grants[:2]))
        second = self.result(self.compute(sequence, 8, PROMPT[8:], outputs=grants[2:], sampling=GREEDY))
        assert isinstance(first, ChunkComputed)
        assert first.token is None
        return self.commit(grants, first.checksums + second.checksums), second.token

    def decode(self, sequence, token, steps=STEPS):
        tokens = []
        for position in range(len(PROMPT), len(PROMPT) + steps):
            result = self.run(DecodeStep((StepEntry(sequence, token, position, GREEDY),)))
            assert isinstance(result, StepDecoded)
            ((token,),) = result.tokens
            tokens.append(token)
        return tokens

    def close(self):
        self.executor.close()
        if self.server:
            self.server.close()


@pytest.fixture
def make_rig(make_segment, crashes, tmp_path):
    rigs = []

    def make(name, **options):
        rigs.append(Rig(name, make_segment(name, slots=options.pop("slots", 16)), crashes, tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        ended = [event.work_id for event in rig.events if isinstance(event, WorkDone)]
        assert sorted(ended) == list(range(1, rig.next_id + 1)), "every work ends exactly once"


def reference():
    """First token and STEPS more of PROMPT, by the engine alone."""
    engine = ToyEngine()
    sequence = engine.new_sequence(64)
    tokens = [int(engine.prefill(sequence, PROMPT)[0].argmax())]
    for _ in range(STEPS):
        tokens.append(int(engine.decode([sequence], np.array(tokens[-1:], np.int32))[0].argmax()))
    return tokens[0], tokens[1:]


def loads(refs, tokens=len(PROMPT), layers=range(3)):
    return tuple(BlockLoad(block, ref, layers.start, layers.stop, min(4, tokens - 4 * block)) for block, ref in enumerate(refs))


def opened(ref):
    """The same slot as its readers know it before the commit."""
    return SlotRef(node=ref.node, incarnation=1, slot=ref.slot, generation=ref.generation - 1, checksum=0)


def test_chunks_then_steps_equal_the_bare_engine(make_rig):
    rig = make_rig("a")
    token, more = reference()
    refs, first = rig.prefill()
    assert first == token
    assert rig.decode(1, first) == more
    layers = [event.progress for event in rig.events if not isinstance(event, WorkDone)]
    assert layers == [LayersComputed(layer) for layer in (1, 2, 3)] * 2
    for ref in refs:
        assert ref.checksum == block_checksum(rig.segment.parts(ref.slot).tolist())


def test_a_batch_of_two_sequences_is_sampled_in_order(make_rig):
    rig = make_rig("a")
    first, more = reference()
    rig.prefill(1, (0, 1, 2, 3))
    rig.prefill(2, (4, 5, 6, 7))
    entries = (StepEntry(2, first, 14, GREEDY), StepEntry(1, 9, 14, GREEDY))
    ((two, one),) = rig.run(DecodeStep(entries)).tokens
    assert two == more[0]
    # Sequence 1 goes back one step: what it was fed before does not count.
    assert rig.decode(1, first) == more
    assert one != more[0]


@pytest.mark.parametrize("where", ["own", "neighbour", "remote"])
def test_a_loaded_prefix_gives_the_same_tokens(make_rig, where):
    source = make_rig("a", host="there" if where == "remote" else "here", serve=where == "remote")
    rig = source if where == "own" else make_rig("b")
    token, more = reference()
    refs, _ = source.prefill()
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(9, 32))
    outputs = rig.grants(8)
    work = rig.compute(9, 12, PROMPT[12:], prefix=loads(refs[:3]), outputs=outputs, sampling=GREEDY)
    result = rig.result(work)
    assert (result.token, result.failed) == (token, ())
    assert 0 <= result.waited_s <= result.elapsed_s
    assert result.loaded_s > 0
    assert result.checksums == (refs[3].checksum,)
    assert rig.decode(9, token) == more


def test_a_computed_head_and_a_loaded_tail_give_the_same_tokens(make_rig):
    """Of a prompt's blocks the first is computed, and the others are loaded by the chunk behind them."""
    rig = make_rig("a")
    token, more = reference()
    refs, _ = rig.prefill()
    rig.executor.open_sequence(OpenSequence(9, 32))
    assert rig.result(rig.compute(9, 0, PROMPT[:4], outputs=rig.grants(8))).checksums == (refs[0].checksum,)
    work = rig.compute(9, 12, PROMPT[12:], prefix=loads(refs[:3])[1:], outputs=rig.grants(9), sampling=GREEDY)
    result = rig.result(work)
    assert (result.token, result.failed, result.checksums) == (token, (), (refs[3].checksum,))
    assert rig.decode(9, token) == more


def test_a_sequence_hears_how_much_of_it_will_be_filled(make_rig, monkeypatch):
    rig = make_rig("a")
    told = []
    monkeypatch.setattr(SequenceKV, "expect", lambda self, tokens: told.append((self.capacity, tokens)))
    rig.executor.open_sequence(OpenSequence(1, 32, GREEDY, b"", 20))
    assert told == [(32, 20)]


def test_the_layers_of_a_short_chunk_are_told_with_its_result_alone(make_rig):
    rig = make_rig("a", progress_s=3600.0)
    rig.prefill()
    assert all(isinstance(event, WorkDone) for event in rig.events)


def test_of_a_long_chunk_the_last_layer_is_told_at_once_however_lately_another_was(make_rig, monkeypatch):
    rig = make_rig("a", progress_s=40.0)
    rig.executor.open_sequence(OpenSequence(1, 32))
    work = ComputeChunk(1, 0, PROMPT[:8].tobytes(), (), tuple(rig.grants(0, 1)), None, math.inf)
    job = Job(1, work, math.inf, sequences={1: rig.executor._works.sequences[1]})
    clock = SimpleNamespace(monotonic=partial(next, count(0.0, 10.0)), perf_counter=time.perf_counter)
    ((_, turn),) = rig.executor._compute.chunk(job, work).turns
    for module in (compute, jobs):  # each look at it, two behind each layer, 10 s after the one before
        monkeypatch.setattr(module, "time", clock)
    turn()
    assert [event.progress for event in rig.events] == [LayersComputed(1), LayersComputed(3)]


def test_loading_a_band_of_layers_overlaps_with_computing_the_one_before(make_rig, monkeypatch):
    source, rig = make_rig("a"), make_rig("b")
    refs, token = source.prefill()
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))
    computed_at_load = {}

    def load_late(loads, sequence, **options):
        """A band is loaded only once the layers before it are computed: no progress unless the two overlap."""
        ((_, _, layers),) = loads
        if layers.start:
            rig.wait_for(lambda event: event == WorkProgress(1, LayersComputed(layers.start)))
        computed_at_load[layers] = len(rig.events)
        return load_blocks(loads, sequence, **options)

    monkeypatch.setattr(loads_module, "load_blocks", load_late)
    work = rig.compute(1, 8, PROMPT[8:], prefix=loads(refs[:2]), sampling=GREEDY)
    assert rig.result(work).token == token
    assert computed_at_load == {range(1): 0, range(1, 3): 1}, "and none is computed before it is loaded"


@pytest.mark.parametrize("host", ["here", "there"])
def test_a_decode_pulls_what_a_prefill_wrote(make_rig, host):
    source, rig = make_rig("a", host=host, serve=True), make_rig("b")
    token, more = reference()
    refs, _ = source.prefill()
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))
    result = rig.run(PullBlocks(1, loads(refs)))
    assert isinstance(result, BlocksPulled)
    assert result.failed == ()
    expected = [
        (block, layer, sum_) for block, ref in enumerate(refs) for layer, sum_ in enumerate(source.segment.parts(ref.slot))
    ]
    assert list(result.parts) == expected
    assert rig.decode(1, token) == more
    assert (source.server.counts["reads"] > 0) is (host == "there")


@pytest.mark.parametrize("host", ["here", "there"])
def test_a_decode_pulls_layers_before_the_commit(make_rig, host):
    source, rig = make_rig("a", host=host, serve=True), make_rig("b")
    token, more = reference()
    refs, _ = source.prefill()
    source.executor.fence([(refs[0].slot, refs[0].generation)])
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))
    for layer in range(3):
        result = rig.run(PullBlocks(1, loads([opened(ref) for ref in refs], layers=range(layer, layer + 1))))
        assert [(block, at) for block, at, _ in result.parts] == [(block, layer) for block in range(4)]
    assert rig.decode(1, token) == more


def test_penalties_read_the_prompt_and_what_was_decoded_and_probabilities_are_told(make_rig):
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=1.0, logprobs=2, prompt_tokens=len(PROMPT))
    rig = make_rig("a")
    rig.executor.open_sequence(OpenSequence(1, 32, sampling, sampling.past(PROMPT.tobytes())))
    chunk = rig.result(rig.compute(1, 0, PROMPT, sampling=sampling))
    answer, told = [chunk.token], [chunk.logprob]
    for position in range(len(PROMPT), len(PROMPT) + 6):
        step = rig.run(DecodeStep((StepEntry(1, answer[-1], position, sampling),)))
        answer.append(step.tokens[0][0])
        told.append(step.logprobs[0][0])
    resumed = np.append(PROMPT, answer[:3]).astype(np.int32)
    rig.executor.open_sequence(OpenSequence(2, 32, sampling, sampling.past(resumed.tobytes())))
    again = rig.result(rig.compute(2, 0, resumed, sampling=sampling))
    assert (again.token, again.logprob) == (answer[3], told[3])
    run = rig.run(DecodeStep((StepEntry(2, answer[3], len(resumed), sampling),), steps=3))
    assert [row[0] for row in run.tokens] == answer[4:]
    rig.executor.open_sequence(OpenSequence(3, 32, GREEDY))
    plain = rig.result(rig.compute(3, 0, PROMPT, sampling=GREEDY))
    assert plain.logprob is None
    assert rig.run(DecodeStep((StepEntry(3, plain.token, len(PROMPT), GREEDY),))).logprobs == ()


def constrained(make_rig, grammar, **asked):
    """A rig, its sampling, and the first token of an answer."""
    sampling = Sampling(constraint=of_lark(grammar), prompt_tokens=len(PROMPT), **asked)
    rig = make_rig("a", grammars=Grammars("toy", 512))
    rig.executor.open_sequence(OpenSequence(1, 64, sampling, sampling.past(PROMPT.tobytes())))
    ((token, _),) = rig.first(1, PROMPT, sampling)
    return rig, sampling, token


def test_an_answer_with_a_constraint_follows_it_wherever_it_goes_on(make_rig):
    rig, sampling, first = constrained(make_rig, 'start: "<" /[a-z]/ /[0-9]{4}/ ">"')
    answer = [first, *rig.answer(1, first, sampling, steps=9)]
    assert re.fullmatch(r"<[a-z]\d{4}>", bytes(answer[:7]).decode())
    assert answer[7:] == [256] * 3, "nothing but ends follow"
    for cut in (1, 4, 7):
        resumed = np.append(PROMPT, answer[:cut]).astype(np.int32)
        rig.executor.open_sequence(OpenSequence(10 + cut, 64, sampling, sampling.past(resumed.tobytes())))
        ((token, _),) = rig.first(10 + cut, resumed, sampling)
        assert token == answer[cut]


def test_a_constraint_that_cannot_be_followed_fails_its_answer_alone(make_rig):
    rig, sampling, first = constrained(make_rig, 'start: ("a"{1,1000}){1,1000}', logit_bias=((ord("a"), 100.0),))
    rig.executor.open_sequence(OpenSequence(2, 64))
    other = rig.result(rig.compute(2, 0, PROMPT, sampling=GREEDY))
    entries = StepEntry(1, first, len(PROMPT), sampling, TIMEOUT_S), StepEntry(2, other.token, len(PROMPT), GREEDY)
    run = rig.run(DecodeStep(entries, steps=40))
    assert [(place, why.stuck) for place, why in run.failed] == [(0, True)]
    assert 1 < len(run.tokens) < 40
    assert [row[1] for row in run.tokens][:STEPS] == reference()[1][: len(run.tokens)]
    nonsense = Sampling(constraint=b"{", prompt_tokens=len(PROMPT))
    rig.executor.open_sequence(OpenSequence(3, 64, nonsense, b""))
    failed = rig.first(3, PROMPT, nonsense)
    assert isinstance(failed, WorkFailed)
    assert failed.reason.startswith("constraint: ")
    assert failed.stuck


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_answer_alone(make_rig, monkeypatch, temperature):
    rig, sampling = make_rig("a"), Sampling(temperature=temperature, logprobs=1)
    tokens, expected = [], reference()[1]
    for sequence in (1, 2):
        rig.executor.open_sequence(OpenSequence(sequence, 64))
        tokens.append(rig.first(sequence, PROMPT, GREEDY)[0][0])
    decode, steps = ToyEngine.decode, count()

    def damaged(self, sequences, tokens):
        logits = decode(self, sequences, tokens)
        logits[0, 5] = np.nan if next(steps) else 0.0
        return logits

    monkeypatch.setattr(ToyEngine, "decode", damaged)
    entries = (StepEntry(1, tokens[0], len(PROMPT), sampling), StepEntry(2, tokens[1], len(PROMPT), GREEDY))
    run = rig.run(DecodeStep(entries, steps=4))
    assert run.failed == ((0, WorkFailed("the model computed no finite logits", stuck=True)),)
    assert [row[1] for row in run.tokens] == expected[:2]
    monkeypatch.setattr(ToyEngine, "_logits", lambda *_: np.full(ToyEngine().spec.vocab_size, np.nan, np.float32))
    rig.executor.open_sequence(OpenSequence(3, 64))
    assert rig.first(3, PROMPT, sampling) == WorkFailed("the model computed no finite logits", stuck=True)
    rig.executor.open_sequence(OpenSequence(4, 64))
    work = ComputeChunk(4, 0, PROMPT.tobytes(), (), (), None, prompt_logprobs=3)
    assert rig.run(work) == WorkFailed("the model computed no finite logits", stuck=True)


@pytest.fixture
def slow(monkeypatch):
    """A grammar that is not ready before this is called."""
    go_on, ask, waiting = threading.Event(), Grammars.ask, []

    def held(grammars, following):
        if b"slow" not in following.constraint or go_on.is_set():
            return ask(grammars, following)
        made = Future()
        waiting.append((made, grammars, following))
        return made

    def let_go():
        go_on.set()
        for made, grammars, following in waiting:
            if made.set_running_or_notify_cancel():
                ask(grammars, following).add_done_callback(lambda done, made=made: made.set_result(done.result()))

    monkeypatch.setattr(Grammars, "ask", held)
    return let_go


def entered(rig, sequence, grammar):
    sampling = GREEDY if grammar is None else Sampling(constraint=of_lark(grammar), prompt_tokens=len(PROMPT))
    rig.executor.open_sequence(OpenSequence(sequence, 64, sampling, sampling.past(PROMPT.tobytes()) if grammar else b""))
    chunk = rig.result(rig.compute(sequence, 0, PROMPT, sampling=None if grammar else GREEDY))
    waits_s = TIMEOUT_S if grammar and "slow" not in grammar else 0.0
    return StepEntry(sequence, ord("s") if grammar else chunk.token, len(PROMPT), sampling, waits_s)


def test_an_answer_whose_grammar_is_not_ready_stops_nobody_and_gets_its_token_when_it_is(make_rig, slow):
    rig = make_rig("a", grammars=Grammars("toy", 512))
    plain, ready, newcomer = entered(rig, 1, None), entered(rig, 2, 'start: "sea"'), entered(rig, 3, 'start: "slow"')
    run = rig.run(DecodeStep((plain, ready, newcomer), steps=4))
    assert run.sat_out == (2,)
    assert run.failed == ()
    assert len(run.tokens) == 1, "a run of steps ends where somebody sits out"
    assert run.tokens[0][:2] == (reference()[1][0], ord("e"))
    late = rig.start(SampleTokens(3))
    sampled = zip((plain, ready), run.tokens[0][:2], strict=True)
    after = [structs.replace(entry, token=token, position=len(PROMPT) + 1) for entry, token in sampled]
    assert rig.run(DecodeStep(tuple(after))).tokens == ((reference()[1][1], ord("a")),), "others step meanwhile"
    slow()
    assert rig.result(late) == TokensSampled(((ord("l"), None),))
    rejoins = structs.replace(newcomer, token=ord("l"), position=len(PROMPT) + 1, mask_s=TIMEOUT_S)
    assert rig.run(DecodeStep((rejoins,))).tokens == ((ord("o"),),)


def test_a_prompt_whose_grammar_is_not_ready_stops_no_other_and_is_sampled_without_its_kv(make_rig, slow):
    rig = make_rig("a", grammars=Grammars("toy", 512))
    sampling = Sampling(constraint=of_lark('start: "slow"'), prompt_tokens=len(PROMPT))
    rig.executor.open_sequence(OpenSequence(1, 64, sampling))
    chunk = rig.result(rig.compute(1, 0, PROMPT, sampling=sampling))
    assert (chunk.token, chunk.others) == (None, ())
    late = rig.start(SampleTokens(1))
    opened = rig.executor._works.sequences[1]
    rig.executor.close_sequence(1)
    assert opened.memory is None, "its memory is free at once"
    rig.executor.open_sequence(OpenSequence(2, 64))
    assert rig.result(rig.compute(2, 0, PROMPT, sampling=GREEDY)).token == reference()[0]
    slow()
    assert rig.result(late) == TokensSampled(((ord("s"), None),))


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_what_waits_for_a_grammar_ends_when_it_is_to(make_rig, slow, end):
    rig = make_rig("a", grammars=Grammars("toy", 512))
    sampling = Sampling(constraint=of_lark('start: "slow"'), prompt_tokens=len(PROMPT))
    rig.executor.open_sequence(OpenSequence(1, 64, sampling))
    rig.result(rig.compute(1, 0, PROMPT, sampling=sampling))
    late = rig.start(SampleTokens(1), 0.05 if end == "deadline" else TIMEOUT_S)
    rig.executor.close_sequence(1)
    if end == "cancel":
        rig.executor.cancel(late)
    if end == "close":
        rig.close()
    reason = {"cancel": "cancelled", "close": "closed", "deadline": "deadline"}[end]
    assert rig.result(late) == WorkFailed(reason)


def test_a_sampler_that_is_closed_ends_after_the_last_job_that_was_stopped():
    job = SimpleNamespace(stopped="", deadline=time.monotonic() + 1000, is_late=lambda: False)
    looked, sampled = threading.Event(), threading.Event()
    job.unsampled = SimpleNamespace(awaited=lambda: looked.set() or Future(), left_s=lambda: 1000.0)
    sampler = Sampler(on_crash=pytest.fail)
    sampler.put(job, sampled.set)
    assert looked.wait(TIMEOUT_S)
    job.stopped = "closed"
    closing = threading.Thread(target=sampler.close, daemon=True)
    closing.start()
    assert sampled.wait(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


def test_a_first_token_is_waited_for_as_long_as_any_other(make_rig, slow, monkeypatch):
    rig = make_rig("a", grammars=Grammars("toy", 512))
    sampling = Sampling(constraint=of_lark('start: "slow"'), prompt_tokens=len(PROMPT))
    rig.executor.open_sequence(OpenSequence(1, 64, sampling))
    rig.result(rig.compute(1, 0, PROMPT, sampling=sampling))
    monkeypatch.setattr(grammars_module, "MAX_WAIT_S", 0.05)
    failed = rig.run(SampleTokens(1))
    assert "not ready in 0.05 s" in failed.reason
    assert not failed.stuck, "another one may be in time"


def test_who_waits_for_too_long_fails_alone(make_rig, slow, monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_WAIT_S", 0.0)
    rig = make_rig("a", grammars=Grammars("toy", 512))
    plain, newcomer = entered(rig, 1, None), entered(rig, 2, 'start: "slow"')
    run = rig.run(DecodeStep((plain, newcomer)))
    assert [(row, why.stuck) for row, why in run.failed] == [(1, False)], "another one may be in time"
    assert "not ready" in run.failed[0][1].reason


def test_choices_are_sampled_by_their_seeds_and_go_on_from_copies(make_rig):
    sampling = Sampling(temperature=1.0, seed=5, logprobs=1, prompt_tokens=len(PROMPT))
    rig = make_rig("a")
    for sequence in (1, 2, 3):
        rig.executor.open_sequence(OpenSequence(sequence, 32, sampling))
    work = ComputeChunk(1, 0, PROMPT.tobytes(), (), (), sampling, seeds=(6, 7))
    chunk = rig.result(rig.start(work, TIMEOUT_S))
    alone = []
    for seed in (5, 6, 7):
        rig.executor.open_sequence(OpenSequence(10 + seed, 32, sampling))
        own = structs.replace(sampling, seed=seed)
        result = rig.result(rig.compute(10 + seed, 0, PROMPT, sampling=own))
        alone.append((result.token, result.logprob))
    assert [(chunk.token, chunk.logprob), *chunk.others] == alone
    assert len({token for token, _ in alone}) > 1
    step = StepEntry(1, alone[0][0], len(PROMPT), sampling)
    rig.run(DecodeStep((step,)))  # the first goes on meanwhile
    assert rig.run(ForkSequence(1, (2, 3), len(PROMPT))) == SequenceForked()
    entries = [(sequence, alone[sequence - 1][0], 4 + sequence) for sequence in (2, 3)]
    for sequence, token, seed in entries:
        own = structs.replace(sampling, seed=seed)
        steps = [rig.run(DecodeStep((StepEntry(each, token, len(PROMPT), own),))) for each in (sequence, 10 + seed)]
        assert steps[0].tokens == steps[1].tokens


def test_a_copy_without_memory_keeps_no_other_from_being_made(make_rig, monkeypatch):
    rig = make_rig("a")
    for sequence in (1, 3):
        rig.executor.open_sequence(OpenSequence(sequence, 32))
    monkeypatch.setattr(ToyEngine, "new_sequence", Mock(side_effect=MemoryError))
    rig.executor.open_sequence(OpenSequence(2, 32))
    chunk = rig.result(rig.compute(1, 0, PROMPT, sampling=GREEDY))
    assert rig.run(ForkSequence(1, (2, 3), len(PROMPT))) == SequenceForked((2,))
    steps = [rig.run(DecodeStep((StepEntry(each, chunk.token, len(PROMPT), GREEDY),))) for each in (1, 3)]
    assert steps[0].tokens == steps[1].tokens
    assert rig.run(ForkSequence(2, (3,), len(PROMPT))) == WorkFailed("no memory for the sequence")


def test_choices_with_a_constraint_follow_it_each_by_itself(make_rig):
    sampling = Sampling(temperature=5.0, constraint=of_lark("start: /[a-z]{6}/"), prompt_tokens=len(PROMPT))
    rig = make_rig("a", grammars=Grammars("toy", 512))
    for sequence in (1, 2, 3):
        rig.executor.open_sequence(OpenSequence(sequence, 32, sampling))
    firsts = [token for token, _ in rig.first(1, PROMPT, sampling, seeds=(1, 2))]
    assert rig.run(ForkSequence(1, (2, 3), len(PROMPT))) == SequenceForked()
    choices = [structs.replace(sampling, seed=seed) for seed in range(3)]
    entries = [StepEntry(i + 1, firsts[i], len(PROMPT), choices[i], TIMEOUT_S) for i in range(3)]
    run = rig.run(DecodeStep(tuple(entries), steps=6))
    answers = [bytes([firsts[i], *(row[i] for row in run.tokens[:5])]).decode() for i in range(3)]
    assert len(set(answers)) == 3
    assert all(re.fullmatch("[a-z]{6}", answer) for answer in answers)
    assert list(run.tokens[5]) == [256] * 3, "nothing but ends follow"


@pytest.mark.parametrize("cut", [4, 12, len(PROMPT)])
def test_a_prompts_probabilities_are_told_chunk_by_chunk(make_rig, cut):
    rig, engine = make_rig("a"), ToyEngine()
    logits = engine.prefill(engine.new_sequence(32), PROMPT, logits_at=range(len(PROMPT)))
    expected = [logprob(row, int(token), 3) for row, token in zip(logits, PROMPT[1:], strict=False)]
    rig.executor.open_sequence(OpenSequence(1, 32))
    told, token = [], None
    for start, stop in ((0, cut), (cut, len(PROMPT))):
        if start < stop:
            ends = stop == len(PROMPT)
            work = ComputeChunk(1, start, PROMPT[start:stop].tobytes(), (), (), GREEDY if ends else None)
            work = structs.replace(work, prompt_logprobs=3, following=PROMPT[stop : stop + 1].tobytes())
            chunk = rig.result(rig.start(work, TIMEOUT_S))
            told += chunk.scored
            token = chunk.token
    assert told == expected
    assert token == logits[-1].argmax()


@pytest.mark.parametrize("host", ["here", "there"])
def test_failed_blocks_are_named_and_the_others_arrive(make_rig, host):
    source, rig = make_rig("a", host=host, serve=True), make_rig("b")
    refs, _ = source.prefill()
    slot_bytes(source.segment, refs[1].slot)[3] ^= 1
    source.grants(refs[2].slot)
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))
    result = rig.run(PullBlocks(1, loads(refs)))
    assert (result.failed, result.corrupt) == ((1, 2), (1,)), "the other was only taken away"
    assert {block for block, _, _ in result.parts} == {0, 3}
    rig.executor.open_sequence(OpenSequence(2, 32))
    work = rig.compute(2, 12, PROMPT[12:], prefix=loads(refs[:3]), sampling=GREEDY)
    chunk = rig.result(work)
    assert isinstance(chunk, ChunkComputed)
    assert set(chunk.failed) <= {1, 2}
    assert chunk.failed
    assert set(chunk.corrupt) == set(chunk.failed) & {1}
    assert (chunk.token, chunk.checksums) == (None, ())


def test_sources_of_unknown_or_dead_lives_fail_per_block(make_rig, make_segment, tmp_path):
    source, rig = make_rig("a"), make_rig("b")
    refs, _ = source.prefill()
    rig.executor.open_sequence(OpenSequence(1, 32))
    assert rig.run(PullBlocks(1, loads(refs))).failed == (0, 1, 2, 3)
    rig.meet(source)
    os.rename(source.segment.path, tmp_path / "away")
    assert rig.run(PullBlocks(1, loads(refs))).failed == (0, 1, 2, 3)
    os.rename(tmp_path / "away", source.segment.path)
    assert rig.run(PullBlocks(1, loads(refs))).failed == ()
    next_life = structs.replace(source.hello().segment, path=str(source.segment.path.with_name("mooncake=test=a=2")))
    rig.executor.learn_peer("a", 2, structs.replace(source.hello(), segment=next_life))
    assert rig.run(PullBlocks(1, loads(refs))).failed == (0, 1, 2, 3)
    rig.meet(source)  # an older life than the one known
    assert rig.run(PullBlocks(1, loads(refs))).failed == (0, 1, 2, 3)


def test_a_remote_source_that_is_forgotten_fails_at_once(make_rig):
    source, rig = make_rig("a", host="there", serve=True), make_rig("b")
    refs, _ = source.prefill()
    rig.meet(source)
    rig.executor.forget_peer("a")
    rig.executor.open_sequence(OpenSequence(1, 32))
    assert rig.run(PullBlocks(1, loads(refs))).failed == (0, 1, 2, 3)


def test_puts_to_a_neighbours_slots(make_rig):
    rig, pool = make_rig("a"), make_rig("pool")
    refs, _ = rig.prefill()
    rig.meet(pool)
    pool.meet(rig)
    grants = pool.grants(0, 1, 2, 3)
    pool.grants(3)
    void = SlotGrant("pool", 1, 3, grants[3].generation + 2)
    bad = SlotRef(node="a", incarnation=1, slot=0, generation=2, checksum=1)
    copies = ((refs[0], grants[0]), (SequenceBlock(1, 1), grants[1]), (bad, grants[2]), (refs[2], void))
    result = rig.run(CopyBlocks(copies))
    assert result == BlocksCopied((refs[0].checksum, refs[1].checksum, None, None), (2,))
    stored = pool.commit(grants[:2], result.checksums[:2])
    reader = make_rig("c")
    reader.meet(pool)
    reader.executor.open_sequence(OpenSequence(1, 32))
    assert reader.run(PullBlocks(1, loads(stored))).failed == ()


def test_fetches_from_another_host_into_own_slots(make_rig):
    source, pool = make_rig("a", host="there", serve=True), make_rig("pool")
    refs, _ = source.prefill()
    pool.meet(source)
    grants = pool.grants(5, 6, 7)
    slot_bytes(source.segment, refs[1].slot)[70] ^= 1
    void = SlotGrant("pool", 1, 7, 99)
    result = pool.run(CopyBlocks(((refs[0], grants[0]), (refs[1], grants[1]), (refs[2], void), (refs[3], grants[2]))))
    assert result == BlocksCopied((refs[0].checksum, None, None, refs[3].checksum), (1,))
    (stored, _) = pool.commit((grants[0], grants[2]), (refs[0].checksum, refs[3].checksum))
    pool.executor.open_sequence(OpenSequence(1, 32))
    assert pool.run(PullBlocks(1, loads([stored]))).failed == ()


def test_a_lock_tells_whether_a_life_is_over(make_rig, tmp_path):
    rig = make_rig("a")
    lock = ProcessLock.acquire(tmp_path, "other")
    assert rig.run(ProbeProcess("other", lock.incarnation)) == ProcessProbed(True)
    assert rig.run(ProbeProcess("other", lock.incarnation - 1)) == ProcessProbed(False)
    lock.release()
    assert rig.run(ProbeProcess("other", lock.incarnation)) == ProcessProbed(False)


class GatedEngine(ToyEngine):
    """Stops before its first layer until it is let on."""

    def __init__(self):
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()
        self.sequences = []

    def new_sequence(self, capacity_tokens):
        self.sequences.append(super().new_sequence(capacity_tokens))
        return self.sequences[-1]

    def prefill(self, sequence, tokens, **options):
        self.entered.set()
        assert self.go.wait(TIMEOUT_S)
        return super().prefill(sequence, tokens, **options)


def test_a_run_of_steps_samples_what_single_steps_do(make_rig):
    rig = make_rig("a")
    first, more = reference()
    rig.prefill(1, (0, 1, 2, 3))
    run = rig.run(DecodeStep((StepEntry(1, first, 14, GREEDY),), steps=len(more)))
    assert [token for (token,) in run.tokens] == more
    assert rig.decode(1, first) == more


def test_a_cancelled_run_of_steps_ends_at_its_next_border_and_has_not_failed(make_rig):
    """A decode cancels it because somebody waits for its end: had it failed, all its requests would begin anew elsewhere."""
    engine = GatedEngine()
    engine.go.set()
    rig = make_rig("a", engine=engine)
    first, more = reference()
    rig.prefill(1, (0, 1, 2, 3))
    rig.executor.open_sequence(OpenSequence(2, 32))
    engine.entered.clear()
    engine.go.clear()
    chunk = rig.compute(2, 0, PROMPT, sampling=GREEDY)
    assert engine.entered.wait(TIMEOUT_S)
    run = rig.start(DecodeStep((StepEntry(1, first, 14, GREEDY),), steps=len(more)))
    rig.executor.cancel(run)
    engine.go.set()
    rig.result(chunk)
    assert rig.result(run).tokens == ((more[0],),)


def test_late_and_cancelled_works_fail(make_rig):
    engine = GatedEngine()
    rig = make_rig("a", engine=engine)
    rig.executor.open_sequence(OpenSequence(1, 32))
    running = rig.compute(1, 0, PROMPT, sampling=GREEDY)
    assert engine.entered.wait(TIMEOUT_S)
    late = rig.start(DecodeStep((StepEntry(1, 1, 14, GREEDY),)), deadline_s=0.0)
    waiting = rig.start(DecodeStep((StepEntry(1, 1, 14, GREEDY),)))
    rig.executor.cancel(waiting)
    rig.executor.cancel(running)
    rig.executor.cancel(12345)
    engine.go.set()
    assert rig.result(running) == WorkFailed("cancelled")
    assert rig.result(late) == WorkFailed("deadline")
    assert rig.result(waiting) == WorkFailed("cancelled")
    assert rig.run(PullBlocks(1, ()), deadline_s=0.0) == BlocksPulled((), ())
    assert rig.run(CopyBlocks(((SequenceBlock(1, 0), SlotGrant("a", 1, 0, 1)),)), deadline_s=0.0) == WorkFailed("deadline")
    # The rig still works, and the cancelled chunk can be computed again.
    assert rig.result(rig.compute(1, 0, PROMPT, sampling=GREEDY)).token == reference()[0]


def test_a_cancelled_chunk_frees_the_compute_thread_while_its_load_still_runs(make_rig, monkeypatch):
    source, rig = make_rig("a"), make_rig("b")
    refs, token = source.prefill()
    rig.meet(source)
    for sequence in (1, 2):
        rig.executor.open_sequence(OpenSequence(sequence, 32))
    loading, go = threading.Event(), threading.Event()

    def load_slowly(*args, **options):
        loading.set()
        assert go.wait(TIMEOUT_S)
        return load_blocks(*args, **options)

    monkeypatch.setattr(loads_module, "load_blocks", load_slowly)
    work = rig.compute(1, 8, PROMPT[8:], prefix=loads(refs[:2]), sampling=GREEDY)
    assert loading.wait(TIMEOUT_S)
    other = rig.compute(2, 0, PROMPT, sampling=GREEDY)
    rig.executor.cancel(work)
    assert rig.result(other).token == token
    assert not any(isinstance(event, WorkDone) and event.work_id == work for event in rig.events), "it may still write"
    go.set()
    assert rig.result(work) == WorkFailed("cancelled")


class SilentServer:
    """Accepts connections and never answers."""

    def __init__(self):
        import socket

        self.socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.socket.getsockname()[1]}"

    def close(self):
        self.socket.close()


@pytest.mark.parametrize(("how", "reason"), [("deadline", "deadline"), ("cancel", "cancelled"), ("close", "closed")])
def test_a_chunk_does_not_wait_for_ever_for_its_prefix(make_rig, how, reason):
    source, rig = make_rig("a", host="there"), make_rig("b")
    refs, _ = source.prefill()
    source.server = SilentServer()
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))
    work = rig.compute(1, 8, PROMPT[8:], prefix=loads(refs[:2]), deadline_s=0.2 if how == "deadline" else TIMEOUT_S)
    pull = rig.start(PullBlocks(1, loads(refs)), deadline_s=0.2 if how == "deadline" else TIMEOUT_S)
    if how == "cancel":
        rig.executor.cancel(work)
        rig.executor.cancel(pull)
    elif how == "close":
        rig.executor.close()
    assert rig.result(work) == WorkFailed(reason)
    assert rig.result(pull) == (BlocksPulled((), (0, 1, 2, 3)) if how == "deadline" else WorkFailed(reason))


@pytest.mark.parametrize("host", ["here", "there"])
def test_a_prefix_that_is_late_fails_its_blocks_and_accuses_none(make_rig, monkeypatch, host):
    """The lease it is read under may be over, long before the chunk's own deadline."""
    source, rig = make_rig("a", host=host), make_rig("b")
    refs, _ = source.prefill()
    source.server = SilentServer()
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))

    def load_slowly(*args, **options):
        time.sleep(0.3)
        return load_blocks(*args, **options)

    monkeypatch.setattr(loads_module, "load_blocks", load_slowly)
    chunk = rig.result(rig.compute(1, 8, PROMPT[8:], prefix=loads(refs[:2]), sampling=GREEDY, prefix_s=0.2))
    assert isinstance(chunk, ChunkComputed)
    assert chunk.failed
    assert chunk.corrupt == ()


def test_after_a_crash_of_the_reader_works_still_end_and_closing_tells_no_other_cause(make_rig, crashes, monkeypatch):
    source, rig = make_rig("a", host="there", serve=True), make_rig("b")
    refs, _ = source.prefill()
    rig.meet(source)
    rig.executor.open_sequence(OpenSequence(1, 32))

    def broken(*_):
        raise ArithmeticError("planted")

    monkeypatch.setattr(rig.executor._reader, "_ask", broken)
    assert rig.run(PullBlocks(1, loads(refs))) == BlocksPulled((), (0, 1, 2, 3))
    assert rig.run(PullBlocks(1, loads(refs))) == BlocksPulled((), (0, 1, 2, 3))
    monkeypatch.setattr(rig.executor._works, "_stop", lambda *_: None)
    rig.executor._works._jobs[99] = None  # a work whose end the crash has swallowed
    rig.executor.close()
    rig.executor._works._jobs.clear()
    assert isinstance(crashes.pop(), ArithmeticError)


def test_slow_remote_reads_do_not_hold_up_local_ones(make_rig):
    far, near, rig = make_rig("a", host="there"), make_rig("n"), make_rig("b")
    far_refs, _ = far.prefill()
    near_refs, _ = near.prefill()
    far.server = SilentServer()
    rig.meet(far, near)
    rig.executor.open_sequence(OpenSequence(1, 32))
    rig.executor.open_sequence(OpenSequence(2, 32))
    slow = rig.start(PullBlocks(1, loads(far_refs)))
    assert rig.run(PullBlocks(2, loads(near_refs))).failed == ()
    assert not any(isinstance(event, WorkDone) and event.work_id == slow for event in rig.events)
    rig.executor.cancel(slow)
    assert rig.result(slow) == WorkFailed("cancelled")


def test_an_output_slot_that_was_taken_away_ends_the_chunk(make_rig):
    rig = make_rig("a")
    rig.executor.open_sequence(OpenSequence(1, 32))
    (grant,) = rig.grants(0)
    rig.executor.fence([(0, 5)])
    assert rig.result(rig.compute(1, 0, PROMPT[:4], outputs=(grant,))) == WorkFailed("output slot 0 is no longer granted")


def test_a_sequence_is_freed_after_its_last_work(make_rig):
    engine = GatedEngine()
    rig = make_rig("a", engine=engine)
    rig.executor.open_sequence(OpenSequence(1, 32))
    work = rig.compute(1, 0, PROMPT, sampling=GREEDY)
    assert engine.entered.wait(TIMEOUT_S)
    rig.executor.close_sequence(1)
    assert engine.sequences[0].capacity == 32
    engine.go.set()
    assert rig.result(work).token == reference()[0]
    assert engine.sequences[0].capacity == 0
    with pytest.raises(KeyError):
        rig.start(PullBlocks(1, ()))
    rig.next_id -= 1
    rig.executor.open_sequence(OpenSequence(1, 32))


class BrokenEngine(ToyEngine):
    def prefill(self, *args, **options):
        raise ArithmeticError("planted")


def test_who_computes_does_not_push_aside_who_speaks(make_rig):
    policies = []

    class Noting(ToyEngine):
        def prefill(self, *arguments, **options):
            policies.append(os.sched_getscheduler(0))
            return super().prefill(*arguments, **options)

    make_rig("a", engine=Noting()).prefill()
    own = os.sched_getscheduler(0)
    assert set(policies) == {os.SCHED_BATCH if own == os.SCHED_OTHER else own}


def test_a_bug_ends_the_work_and_is_told(make_rig, crashes):
    rig = make_rig("a", engine=BrokenEngine())
    rig.executor.open_sequence(OpenSequence(1, 32))
    result = rig.result(rig.compute(1, 0, PROMPT))
    assert isinstance(result, WorkFailed)
    assert "planted" in result.reason
    rig.executor.close()
    assert isinstance(crashes.pop(), ArithmeticError)


def test_a_bug_is_told_whatever_becomes_of_the_log(make_rig, crashes, monkeypatch):
    def full(*args, **facts):
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(worker, "log", SimpleNamespace(critical=full))
    rig = make_rig("a", engine=BrokenEngine())
    rig.executor.open_sequence(OpenSequence(1, 32))
    assert isinstance(rig.result(rig.compute(1, 0, PROMPT)), WorkFailed)
    rig.executor.close()
    assert isinstance(crashes.pop(), ArithmeticError)


def test_closing_leaves_no_thread_descriptor_or_mapping(make_segment, crashes, tmp_path):
    def live_once(number):
        source = Rig("a", make_segment(f"a{number}"), crashes, tmp_path, host="there", serve=True)
        rig = Rig("b", make_segment(f"b{number}"), crashes, tmp_path)
        near = Rig("n", make_segment("n"), crashes, tmp_path)
        refs, _ = source.prefill()
        rig.meet(source, near)
        rig.executor.open_sequence(OpenSequence(1, 32))
        assert rig.run(PullBlocks(1, loads(refs))).failed == ()
        near_refs, _ = near.prefill()
        assert rig.run(PullBlocks(1, loads(near_refs))).failed == ()
        for one in (rig, near, source):
            one.close()
            one.segment.close()

    def held():
        threads = sorted(thread.name for thread in threading.enumerate())
        maps = Path("/proc/self/maps").read_text().count("mooncake=")
        return threads, len(os.listdir("/proc/self/fd")), maps

    gc.collect()  # what other tests have closed stays mapped as long as somebody looks at its memory
    others = held()[2]
    live_once(0)  # pyzmq starts a thread of its own at the first zero-copy frame
    before = held()
    for number in (1, 2):
        live_once(number)
    eventually(lambda: held() == before)
    assert before[2] == others
