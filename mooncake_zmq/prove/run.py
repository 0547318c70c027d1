"""One proof: a server with the connector and one without compute the same answers, chapter by chapter, while the first is
killed, left by its clients, given flipped bits, and restarted with another model in the place of the one before."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import httpx

from mooncake_zmq.prove.connectors import CONNECTORS, Storage
from mooncake_zmq.prove.prompts import Question, Questions
from mooncake_zmq.prove.server import Answer, Launch, Server
from mooncake_zmq.prove.tiny_llama import write_model

CLIENTS = 8
FLIP_S = 0.05
TIE = {"float32": 1e-3, "bfloat16": 0.1}
"""The difference of the two largest log-probabilities below which either token is right: rounding depends on the batch."""
SMALL = ("--block-size", "32", "--num-gpu-blocks-override", "60", "--max-model-len", "1024", "--max-num-seqs", "8")
"""Room for 1,920 tokens: few of the prompts, so that the engine evicts all the time, and preempts."""
DETAILS_KEPT = 5
NOTHING = (0.0, 0.0)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """The model that lies at the path, and its type."""

    seed: int = 0
    rope_theta: float = 10_000.0
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A part of the proof. `share` of all answers; `hang_ups`: share of clients that leave; `kills`: of the server, amid
    answers; `flips`: bits of the stored KV are flipped meanwhile; `loads`: it proves something only if KV was loaded."""

    name: str
    share: float
    hang_ups: float = 0.0
    kills: int = 0
    flips: bool = False
    loads: bool = True
    variant: Variant = Variant()


CHAPTERS = (
    Chapter(name="empty storage", share=0.15, loads=False),
    Chapter(name="killed by SIGKILL amid answers", share=0.2, kills=2),
    Chapter(name="clients that hang up", share=0.2, hang_ups=0.5),
    Chapter(name="flipped bits", share=0.15, flips=True),
    Chapter(name="RoPE changed in config.json", share=0.08, loads=False, variant=Variant(rope_theta=50_000.0)),
    Chapter(name="weights changed in their file", share=0.08, loads=False, variant=Variant(seed=1)),
    Chapter(name="restarted in bfloat16", share=0.07, loads=False, variant=Variant(dtype="bfloat16")),
    Chapter(name="restarted as in the beginning", share=0.07),
)


@dataclass(slots=True)
class Outcome:
    """The result of one chapter. `verdicts`: of the answers, by kind: right, tied, wrong, failed, left, cut."""

    chapter: Chapter
    verdicts: Counter[str] = field(default_factory=Counter)
    loaded_tokens: float = 0.0
    preemptions: float = 0.0
    flipped: int = 0
    """The number of times that bits were flipped in stored KV."""
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return what is wrong."""
        found = [f"{self.verdicts[kind]:,} {kind}" for kind in ("wrong", "failed") if self.verdicts[kind]]
        if self.chapter.loads and not self.loaded_tokens:
            found.append("no KV was loaded, so nothing is proved")
        if self.chapter.flips and not self.flipped:
            found.append("no KV was stored to flip bits of, so nothing is proved")
        return found


@dataclass(slots=True)
class _Reply:
    """The tokens that a client got. `whole`: all that it asked for and stayed for."""

    question: Question
    tokens: list[int]
    whole: bool
    kind: str = ""
    """"failed", "left" or "cut" where it is not whole."""
    error: str = ""


class Proof:
    """Drives a proof. Servers run only within `run`."""

    def __init__(
        self,
        *,
        python: str,
        connector: str,
        answers: int,
        seed: int,
        scratch: Path,
        planted: str = "",
        arguments: Sequence[str] = (),
        say: Say = lambda _text: None,
    ) -> None:
        self._connector, self._answers, self._scratch, self._planted, self._say = connector, answers, scratch, planted, say
        self._random = Random(seed)
        self._questions = Questions(seed)
        self._launch = Launch(python=python, model=scratch / "model", arguments=(*SMALL, *arguments))
        self._launched = self._launch
        """The server with the connector, as it was started last."""
        self._storage = Storage(None)
        self._server: Server | None = None
        self._plain: Server | None = None
        self._up = threading.Event()
        self._lock = threading.Lock()
        self._model: tuple[int, float] | None = None

    def run(self) -> list[Outcome]:
        """Go through all chapters, with a planted bug until it is found. Raises click.ClickException where a server does not
        start."""
        outcomes = []
        with CONNECTORS[self._connector](self._scratch, self._planted) as self._storage:
            try:
                before: Variant | None = None
                for chapter in CHAPTERS:
                    outcomes.append(self._chapter(chapter, changed=chapter.variant != before))
                    before = chapter.variant
                    if self._planted and outcomes[-1].verdicts["wrong"]:
                        break
            finally:
                for server in (self._server, self._plain):
                    if server is not None:
                        server.kill()
        return outcomes

    def _chapter(self, chapter: Chapter, *, changed: bool) -> Outcome:
        began = time.monotonic()
        outcome = Outcome(chapter)
        if changed:
            self._restart_both(chapter.variant)
        server = self._server
        assert server is not None
        before = _counted(server)
        count = max(CLIENTS, round(self._answers * chapter.share))
        flipping = threading.Event()
        flipper = threading.Thread(target=self._flip, args=(flipping, outcome))
        if chapter.flips:
            flipper.start()
        try:
            replies = self._ask_all(chapter, count, outcome, before)
        finally:
            flipping.set()
            if chapter.flips:
                flipper.join()
        self._meter(outcome, before if server is self._server else NOTHING)
        self._judge_all(replies, chapter.variant, outcome)
        outcome.seconds = time.monotonic() - began
        self._say(f"{chapter.name}: {dict(outcome.verdicts)}, {outcome.loaded_tokens:,.0f} tokens loaded")
        return outcome

    def _meter(self, outcome: Outcome, before: tuple[float, float]) -> None:
        """Add what the present server has loaded since `before`."""
        assert self._server is not None
        loaded, preemptions = _counted(self._server)
        outcome.loaded_tokens += loaded - before[0]
        outcome.preemptions += preemptions - before[1]

    # --- servers

    def _restart_both(self, variant: Variant) -> None:
        """Put the variant's model in the place of the one before, and start both servers with it."""
        for server in (self._server, self._plain):
            if server is not None:
                server.kill()
        if self._model != (variant.seed, variant.rope_theta):
            write_model(self._scratch / "model", seed=variant.seed, rope_theta=variant.rope_theta)
            self._model = variant.seed, variant.rope_theta
        arguments = (*self._launch.arguments, "--dtype", variant.dtype)
        plain = replace(self._launch, arguments=(*arguments, "--no-enable-prefix-caching"))
        self._launched = replace(
            self._launch, arguments=arguments, transfer=self._storage.transfer, environment=self._storage.environment
        )
        self._say(f"starting vLLM twice, {variant}")
        self._plain = Server(plain, self._scratch / "plain.log")
        self._start()
        self._plain.ready()

    def _start(self) -> None:
        self._server = Server(self._launched, self._scratch / "connector.log")
        self._server.ready()
        self._up.set()

    def _kill(self) -> None:
        assert self._server is not None
        self._up.clear()
        self._server.kill()
        self._say("killed; starting vLLM again")
        self._start()

    def _flip(self, stop: threading.Event, outcome: Outcome) -> None:
        while True:
            outcome.flipped += self._storage.flip(self._random)
            if stop.wait(FLIP_S):
                return

    # --- questions

    def _ask_all(self, chapter: Chapter, count: int, outcome: Outcome, before: tuple[float, float]) -> list[_Reply]:
        """Ask so many questions, some at a time, and kill the server between them. `before`: its counts at the beginning."""
        kill_at = [count * (number + 1) // (chapter.kills + 1) for number in range(chapter.kills)]
        pool = ThreadPoolExecutor(CLIENTS)
        try:
            futures = [pool.submit(self._one, chapter) for _ in range(count)]
            for at in kill_at:
                while sum(future.done() for future in futures) < at:
                    time.sleep(0.01)
                self._meter(outcome, before)
                before = NOTHING
                self._kill()
            return [future.result() for future in futures]
        finally:  # where a server does not start, no client may wait for it
            self._up.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, chapter: Chapter) -> _Reply:
        with self._lock:
            question = self._questions.next(hang_ups=chapter.hang_ups)
        self._up.wait()
        server = self._server
        assert server is not None
        reply = _Reply(question, [], whole=False, kind="left")
        try:
            if question.leaves == "waiting":
                server.hang_up(question.prompt, question.count, question.leaves_after)
            elif question.leaves == "reading":
                with closing(server.stream(question.prompt, question.count)) as tokens:
                    for token in tokens:
                        reply.tokens.append(token)
                        if len(reply.tokens) >= question.leaves_after:
                            break
            else:
                reply = _Reply(question, server.ask(question.prompt, question.count).tokens, whole=True)
        except (httpx.HTTPError, OSError) as error:
            lost = server is not self._server or not self._up.is_set()
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            reply = _Reply(question, reply.tokens, False, "cut" if lost else "failed", reason)
        with self._lock:
            if reply.whole:
                self._questions.answered(question, reply.tokens)
        return reply

    # --- judgement

    def _judge_all(self, replies: Sequence[_Reply], variant: Variant, outcome: Outcome) -> None:
        plain = self._plain
        assert plain is not None
        wanted = {(reply.question.prompt, reply.question.count): Answer([], []) for reply in replies if reply.tokens}
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = pool.map(lambda asked: plain.ask(*asked, margins=True), wanted)
            wanted = dict(zip(wanted, answers, strict=True))
        for reply in replies:
            if not reply.tokens:
                kind = reply.kind or "wrong"
            else:
                answer = wanted[reply.question.prompt, reply.question.count]
                kind = judge(reply.tokens, answer, whole=reply.whole, tie=TIE[variant.dtype])
                if kind == "right" and not reply.whole:
                    kind = reply.kind
                if kind == "wrong" and len(outcome.details) < DETAILS_KEPT:
                    outcome.details.append(f"{len(reply.question.prompt)} tokens: {reply.tokens}, computed {answer.tokens}")
            if kind == "failed" and len(outcome.details) < DETAILS_KEPT:
                outcome.details.append(reply.error)
            outcome.verdicts[kind] += 1


def _counted(server: Server) -> tuple[float, float]:
    """Return the tokens that a server has loaded, and its preemptions."""
    return server.loaded_tokens(), server.preemptions()


def judge(tokens: Sequence[int], answer: Answer, *, whole: bool, tie: float) -> str:
    """Return "right", "tied" if the first other token was as likely within `tie`, or "wrong". `whole`: it was not cut."""
    for place, (mine, theirs) in enumerate(zip(tokens, answer.tokens, strict=False)):
        if mine != theirs:
            return "tied" if place < len(answer.margins) and answer.margins[place] < tie else "wrong"
    return "wrong" if whole and len(tokens) != len(answer.tokens) else "right"
