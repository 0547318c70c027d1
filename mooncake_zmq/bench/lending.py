"""`bench lending`: decodes that lend each other KV, as processes behind a gateway, and what befalls answers when lenders fail.

Every answer is compared with that of one decode that has all the memory. In turn there are: decodes that all lend and borrow,
for the longest prompt, and then some prompts again and again while their lenders are killed; one that keeps no whole block of a
prompt and others that only lend, for a batch at once; one that keeps half of a prompt, and of each prompt of a batch; and two
that borrow of one lender, which stands still and goes on.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event

import numpy as np

from mooncake_zmq.bench.cluster import STATE_TIMEOUT_S, Answer, BenchCluster, Full, written_cluster
from mooncake_zmq.bench.quality import prepared_model
from mooncake_zmq.bench.report import Progress, Report
from mooncake_zmq.bench.slow_link import random_prompt
from mooncake_zmq.engine import card
from mooncake_zmq.refused import Refused

BLOCK = 16
ANSWER_TOKENS, LONG_ANSWER_TOKENS, STOPPED_ANSWER_TOKENS = 24, 200, 400
BEGUN_TOKENS = 4
"""The tokens of an answer after which its lender is stopped."""
LOADS = 2
"""Requests at once while lenders are killed."""
REFUSED_PAUSE_S = 0.2
CONFIG = """
[model]
path = {model}
cache_dir = {cache_dir}
max_model_len = {tokens}
block_tokens = {block}
[conductor]
ttft_slo_s = 0
tbt_slo_s = 0
[costs]
decode_step_s = 0.02
[cache_node]
pool_bytes = {kv_bytes}
[prefill]
slab_bytes = {kv_bytes}
"""
NODE = """[[nodes]]
name = "{name}"
role = "{role}"
settings = {{ {settings} }}
"""
OTHERS = {"conductor-0": "conductor", "cache-0": "cache-node", "prefill-0": "prefill", "gateway-0": "gateway"}
ALL = "capacity_tokens = {}"
BOTH = "capacity_tokens = {0}, lend_tokens = {0}, borrow = true"
LENDS = "capacity_tokens = {0}, lend_tokens = {0}, max_batch = 0"
BORROWS = "capacity_tokens = {}, borrow = true, own_tokens = 0"

TRIALS = 8

Prompt = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingBench:
    """The parameters of a run. `tokens`: the KV of each decode."""

    model: str
    cache_dir: str = ""
    tokens: int = 4096
    decodes: int = 4
    batch: int = 8
    kills: int = 10


class Lendings:
    """All parts of a run, and the answers so far: the prompts with their answers' lengths, and what came."""

    def __init__(self, bench: LendingBench, progress: Progress) -> None:
        path = prepared_model(bench.model, bench.cache_dir)
        self._bench, self._progress = bench, progress
        self._kv_bytes = 2 * bench.tokens * max(bench.decodes, bench.batch) * card.of_prepared(path).spec.kv_bytes_per_token
        self._random = np.random.default_rng(1)
        self._answers: list[tuple[Prompt, Answer]] = []
        self._refused = 0
        self._report = Report("lending")
        self._long = min(LONG_ANSWER_TOKENS, bench.tokens // 4)

    def run(self) -> Report:
        """Run all of it. Raises click.ClickException when a cluster does not start or answers an error or other tokens."""
        bench = self._bench
        decodes = [f"decode-{number}" for number in range(bench.decodes)]
        with self._cluster({name: BOTH.format(bench.tokens) for name in decodes}) as cluster:
            self._longest(cluster)
            if bench.kills:
                self._kill(cluster, decodes)
        output = bench.batch * (self._long + 2 * BLOCK)
        lenders = {name: LENDS.format(bench.tokens) for name in decodes[1:]}
        length = bench.tokens * (bench.decodes - 1) * 9 // 10 // bench.batch
        prompts = [self._prompt(length) for _ in range(bench.batch)]
        with self._cluster({decodes[0]: BORROWS.format(output), **lenders}) as cluster:
            tbt_s = self._batch(cluster, prompts)
        half, whole = bench.tokens // 2, [self._prompt(bench.tokens // 2 * 2)]
        half_s = self._half(half, whole)
        several = [self._prompt(half * 2) for _ in range(bench.batch)]
        several_s = self._half(half, several)
        self._stop()
        output = bench.batch * (half * 2 + self._long + 2 * BLOCK)
        with self._cluster({"decode-0": ALL.format(max(bench.tokens * bench.decodes, output))}) as cluster:
            lent = list(self._answers)
            for prompt, answer in lent:
                expected = self._complete(cluster, prompt, max_tokens=len(answer.tokens))
                if answer.tokens != expected.tokens:
                    raise Refused(f"other tokens than of one decode with all memory, to a prompt of {len(prompt):,} tokens")
            here_s = self._batch(cluster, prompts)
            whole_s = self._batch(cluster, whole)
            all_s = self._batch(cluster, several)
        self._report.row(
            f"TBT of {bench.batch} at once, all but {BLOCK} tokens elsewhere / all here", "ms", 1e3 * tbt_s, 1e3 * here_s
        )
        self._report.row(f"TBT of one, {half:,} of {2 * half:,} tokens elsewhere / all here", "ms", 1e3 * half_s, 1e3 * whole_s)
        self._report.row(
            f"TBT of {bench.batch} at once, {half:,} of {2 * half:,} tokens of each elsewhere / all here",
            "ms",
            1e3 * several_s,
            1e3 * all_s,
        )
        self._report.notes.append(f"{len(lent)} answers have the tokens of one decode with all memory")
        return self._report

    def _half(self, half: int, prompts: Sequence[Prompt]) -> float:
        """Return the time of a token where the second `half` of each prompt's tokens is here, and the first one elsewhere."""
        each = half + self._long + 2 * BLOCK
        borrows = f"capacity_tokens = {len(prompts) * each}, borrow = true, own_tokens = {half}"
        with self._cluster({"decode-0": borrows, "decode-1": LENDS.format(len(prompts) * half)}) as cluster:
            return self._batch(cluster, prompts)

    @contextmanager
    def _cluster(self, decodes: Mapping[str, str]) -> Iterator[BenchCluster]:
        """Start decodes of these settings, with what they need; at the end nothing is left in them."""
        bench = self._bench
        self._progress(", ".join(f"{name}: {settings}" for name, settings in decodes.items()))
        text = CONFIG.format(
            model=json.dumps(bench.model),
            cache_dir=json.dumps(bench.cache_dir),
            tokens=bench.tokens * bench.decodes,
            block=BLOCK,
            kv_bytes=self._kv_bytes,
        )
        text += "".join(NODE.format(name=name, role=role, settings="") for name, role in OTHERS.items())
        text += "".join(NODE.format(name=name, role="decode", settings=settings) for name, settings in decodes.items())
        with written_cluster(text) as cluster:
            yield cluster
            cluster.settle()
            cluster.wait(lambda: not _having(cluster, decodes, "lent_tokens"), "all loans to be returned")

    def _prompt(self, tokens: int) -> Prompt:
        return random_prompt(self._random, tokens)

    def _complete(
        self, cluster: BenchCluster, prompt: Prompt, *, max_tokens: int = ANSWER_TOKENS, answer: Answer | None = None
    ) -> Answer:
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while True:
            try:
                answer = cluster.complete(prompt, max_tokens=max_tokens, answer=answer)
            except Full:  # also until a decode has reported what is free again
                if time.monotonic() > deadline:
                    raise
                self._refused += 1
                time.sleep(REFUSED_PAUSE_S)
            else:
                self._answers.append((prompt, answer))
                return answer

    def _longest(self, cluster: BenchCluster) -> None:
        bench, total = self._bench, self._bench.tokens * self._bench.decodes
        prompt = self._prompt(cluster.max_model_len - ANSWER_TOKENS)
        answer = self._complete(cluster, prompt)
        self._report.row(f"longest prompt of {bench.decodes} decodes / their KV", "tokens", len(prompt), total, higher=True)
        if cluster.max_model_len < total:
            self._report.notes.append(
                f"the model ends at {cluster.max_model_len:,} positions, not the KV:"
                f""" --model 'dummy:{{"max_positions": {total}}}' has as many"""
            )
        self._report.notes.append(f"of the longest prompt others held {answer.served.get('borrowed_tokens', 0):,} tokens")

    def _batch(self, cluster: BenchCluster, prompts: Sequence[Prompt]) -> float:
        """Complete all prompts at once, and return the time of a token while all were decoded. On a busy machine small ones may
        end before others begin: they are asked again."""
        for _ in range(TRIALS):
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(partial(self._complete, cluster, max_tokens=self._long), prompts))
            since, until = max(answer.ttft_s for answer in answers), min(answer.token_times[-1] for answer in answers)
            if made := sum(since < at <= until for answer in answers for at in answer.token_times):
                return (until - since) * len(prompts) / made
        times = ", ".join(f"{answer.ttft_s:.1f} to {answer.token_times[-1]:.1f} s" for answer in answers)
        raise Refused(f"they were never all decoded at once, {TRIALS} times: {times}")

    def _kill(self, cluster: BenchCluster, decodes: Sequence[str]) -> None:
        """Ask for what no decode holds alone again and again, and kill the lenders meanwhile. An answer comes between two
        kills: a request whose attempts all break is given up after `max_attempts`, as it may be what breaks them."""
        bench, over, attempts = self._bench, Event(), Counter[bool]()
        self._refused, answered = 0, -1

        def ask(prompt: Prompt) -> None:
            while not over.is_set():
                answer = self._complete(cluster, prompt, max_tokens=self._long // 4)
                attempts[int(answer.served["attempts"]) > 1] += 1

        def is_back(node: str, former: int) -> bool:
            return cluster.pid(node) != former and not cluster.missing()

        def lending() -> str:
            for ended in (each for each in asking if each.done()):
                ended.result()  # what made it end says more than that nothing is lent any more
            return next(iter(_having(cluster, decodes, "lent_tokens")), "") if attempts.total() > answered else ""

        with ThreadPoolExecutor(LOADS) as pool:
            asking = [pool.submit(ask, self._prompt(bench.tokens * (5 + number) // 4)) for number in range(LOADS)]
            try:
                for number in range(bench.kills):
                    self._progress(f"kill {number + 1} of {bench.kills}, after {attempts.total()} answers")
                    victim = cluster.wait(lending, "KV to be lent, and an answer since the last kill")
                    answered = attempts.total()
                    pid = cluster.pid(victim)
                    os.kill(pid, signal.SIGKILL)
                    cluster.wait(partial(is_back, victim, pid), f"{victim} to be back")
            finally:
                over.set()
            for each in asking:
                each.result()
        self._report.notes.append(
            f"{bench.kills} lenders were killed: {attempts.total()} answers meanwhile, {attempts[True]} of them by further"
            f" attempts; {self._refused} times there was no room for now, no answer broke off"
        )

    def _stop(self) -> None:
        """Stop a lender of which two decodes borrow until both have answered, and have it go on. A third request borrows
        nothing, beside one of the two. On a busy machine an answer may end before that: they are asked again."""
        tokens = self._bench.tokens
        borrows = f"capacity_tokens = {4 * (STOPPED_ANSWER_TOKENS + 2 * BLOCK)}, borrow = true, own_tokens = {BLOCK}"
        decodes = {"decode-0": borrows, "decode-1": borrows, "decode-2": LENDS.format(tokens)}
        decodes["decode-3"] = LENDS.format(tokens * 3 // 8)  # less than the other still lends when it has lent twice
        with self._cluster(decodes) as cluster, ThreadPoolExecutor(3) as pool:
            for _ in range(TRIALS):
                answers, asking = self._begun(cluster, pool)
                borrowers, lenders = _having(cluster, decodes, "borrowed_tokens"), _having(cluster, decodes, "lent_tokens")
                if len(borrowers) == 2 and len(lenders) == 1 and not any(each.done() for each in asking):
                    break
                for each in asking:
                    each.result()
                cluster.wait(lambda: not _having(cluster, decodes, "lent_tokens"), "all loans to be returned")
            else:
                raise Refused(
                    f"{borrowers} borrowed of {lenders}, or an answer ended, before a lender was stopped, {TRIALS} times"
                )
            with cluster.paused(*lenders):
                for each in asking:
                    each.result()
            cluster.wait(lambda: not _having(cluster, decodes, "lent_tokens"), "the late lender to have its memory back")
            self._complete(cluster, self._prompt(tokens // 8))
        stood = [f"{_stood_s(answer):.1f}" for answer in answers]
        self._report.notes.append(
            f"a lender of two was stopped: they stood still for {stood[0]} and {stood[1]} s, went on with another, and an"
            f" answer beside one of them stood still for {stood[2]} s; what the lender sent when it went on changed nothing"
        )

    def _begun(self, cluster: BenchCluster, pool: ThreadPoolExecutor) -> tuple[list[Answer], list[Future[Answer]]]:
        """Return the answers to two requests that borrow and one that does not, begun one after the other."""
        answers, asking = [], []
        for length in (self._bench.tokens // 8, self._bench.tokens // 8, BLOCK):
            answer = Answer()
            complete = partial(self._complete, cluster, self._prompt(length), max_tokens=STOPPED_ANSWER_TOKENS, answer=answer)
            answers.append(answer)
            asking.append(pool.submit(complete))
            cluster.wait(lambda: len(answer.tokens) >= BEGUN_TOKENS, "an answer to begin")  # noqa: B023
        return answers, asking


def _stood_s(answer: Answer) -> float:
    """Return for how long an answer stood still; the first token of a further attempt may come meanwhile."""
    return max(later - earlier for earlier, later in zip(answer.token_times, answer.token_times[2:], strict=False))


def _having(cluster: BenchCluster, decodes: Iterable[str], gauge: str) -> list[str]:
    """Return the decodes of which a gauge is not zero."""
    return [name for name, dump in cluster.dumps(list(decodes)).items() if dump["gauges"].get(gauge)]
