"""`up --demo`: asks questions about one long document while one prefill is stopped and another is killed.

It succeeds only if what the cluster promises was observed: later questions reuse the document's KV, one of them from the other
host's cache-node, and one after the prefill that serves it was restarted.
"""

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import httpx
from httpx_sse import EventSource
from rich.markup import escape
from rich.table import Table

from mooncake_zmq.core.roles import Role
from mooncake_zmq.operate.up import Up

DOCUMENT = "demo_document.txt"
QUESTIONS = (
    "Who founded the observatory, and in which year?",
    "How high is the tower, and how many steps does it have?",
    "What is the name of the supply boat, and who is her captain?",
    "When do the puffins arrive on the island?",
    "What should you do if you are lost in fog?",
)
ENGINES: tuple[Role, ...] = ("prefill", "decode")
MAX_TOKENS = 48
REUSE_WANTED = 0.9
REQUEST_TIMEOUT_S = 300.0
WAIT_S = 60.0
TRIES = 10
KILL_S = 0.3
STORE_S = 1.0
"""The pause after a question: blocks enter the pool asynchronously, and a question asked at once would reuse fewer."""


@dataclass(slots=True)
class Answer:
    """One question, and what was observed of its answer."""

    question: str
    note: str
    prompt_ids: list[int] = field(default_factory=list)
    served: dict[str, Any] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    asked_at: float = 0.0
    pid: int | None = None
    """The pid of the prefill that served it, at that time."""

    @property
    def cached(self) -> int:
        return sum(int(self.served.get(f"cached_{where}", 0)) for where in ("own", "local", "remote"))

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.asked_at if self.arrivals else float("nan")

    @property
    def tbt_ms(self) -> float:
        gaps = [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
        return statistics.median(gaps) * 1000 if gaps else float("nan")


class ComeAgain(Exception):
    """Raised when the cluster is full, or its conductor is not connected to the nodes yet."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"the cluster is not ready; again in {after_s} s")
        self.after_s = after_s


class DemoFailed(Exception):
    """Raised when something expected did not happen."""


class Demo:
    """Asks questions, stops and kills nodes, asks again, and checks the results."""

    def __init__(self) -> None:
        self._document = resources.files("mooncake_zmq.operate").joinpath(DOCUMENT).read_text(encoding="utf-8")
        self._answers: list[Answer] = []

    def run(self, up: Up) -> int:
        """Run the demonstration; return the exit code."""
        try:
            self._ask_all(up)
        except (DemoFailed, httpx.HTTPError) as error:
            up.say(f"[red]the demo failed[/]: {escape(str(error))}")
            return 1
        up.console.print(self._table())
        return self._judge(up)

    def _ask_all(self, up: Up) -> None:
        words = len(self._document.split())
        up.say(f"one document of {words:,} words, {len(QUESTIONS)} questions; every question repeats the whole document")
        elsewhere = _engines_elsewhere(up)
        if elsewhere:
            up.say(f"[cyan]holding {', '.join(elsewhere)}[/]: the document's KV shall lie on one host alone at first")
        for name in elsewhere:
            up.hold(name)
        self._wait(lambda: not set(elsewhere) & _engines(up), "these to be gone from the cluster")
        first = self._ask(up, QUESTIONS[0], "cold")
        self._ask(up, QUESTIONS[1], "again")

        taken = str(first.served["prefill"])
        for name in elsewhere:
            up.release(name)
        self._wait(lambda: set(elsewhere) <= _engines(up), f"{', '.join(elsewhere)} to be back")
        up.say(f"[cyan]taking {taken} away[/]: the other host's prefill must serve, and its pool does not hold everything")
        up.hold(taken)
        self._wait(lambda: taken not in _engines(up), f"{taken} to be gone from the cluster")
        other = self._ask(up, QUESTIONS[2], "other host")
        up.release(taken)
        self._wait(lambda: taken in _engines(up), f"{taken} to be back")

        victim = str(other.served["prefill"])
        old = up.signal(victim, signal.SIGKILL)
        up.say(f"[cyan]kill -9 {victim}[/] (pid {old}): its own KV is gone, the pool of its host is not")
        self._wait(lambda: up.pid(victim) not in (None, old) and victim in _engines(up), f"{victim} to be back")
        self._ask(up, QUESTIONS[3], "restarted")
        self._ask(up, QUESTIONS[4], "once more")

    def _ask(self, up: Up, question: str, note: str) -> Answer:
        answer = Answer(question, note)
        body = {
            "messages": [
                {"role": "system", "content": "Answer from this handbook, in one sentence.\n\n" + self._document},
                {"role": "user", "content": question},
            ],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"model": up.first_model()} if up.config.models else {}),
        }
        up.console.print(f"\n[bold]{escape(question)}[/] [dim]({note})[/]")
        for chunk in self._chunks(up, answer, body):
            if "error" in chunk:
                raise DemoFailed(str(chunk["error"].get("message")))
            answer.prompt_ids = chunk.get("prompt_token_ids") or answer.prompt_ids
            answer.served = chunk.get("mooncake") or answer.served
            for choice in chunk["choices"]:
                delta = choice.get("delta", {})
                text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                if choice.get("token_ids") or text:
                    answer.arrivals.append(time.monotonic())
                if text:
                    up.console.print(text, end="", markup=False)
        up.console.print()
        if not answer.served:
            raise DemoFailed(f"no usage came with the answer to {question!r}")
        answer.pid = up.pid(str(answer.served["prefill"]))
        self._answers.append(answer)
        time.sleep(STORE_S)
        return answer

    def _chunks(self, up: Up, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answer's chunks; retry as a client should when the gateway requests it."""
        for _ in range(TRIES):
            answer.asked_at = time.monotonic()
            try:
                yield from _stream(up.url, body)
            except ComeAgain as later:
                time.sleep(later.after_s)
            else:
                return
        raise DemoFailed(f"the cluster answered 503 {TRIES} times")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {WAIT_S:.0f} s for {what}")
            time.sleep(0.1)

    # --- results

    def _shared(self) -> int:
        """Return the number of tokens that all prompts begin with."""
        columns = zip(*(answer.prompt_ids for answer in self._answers), strict=False)
        return next((index for index, ids in enumerate(columns) if len(set(ids)) > 1), 0)

    def _reused(self, answer: Answer) -> bool:
        return answer.cached >= REUSE_WANTED * self._shared()

    def _table(self) -> Table:
        title = f"{len(self._answers)} questions about one document; shared prefix: {self._shared():,} tokens"
        # Without a box and with narrow gaps the table fits 80 columns.
        table = Table(
            title=title, caption="own, local, remote: tokens of KV loaded and verified", box=None, padding=(0, 1, 0, 0)
        )
        for name in ("", "prompt", "own", "local", "remote", "", "TTFT s", "TBT ms", "prefill", "decode"):
            table.add_column(name, justify="left" if name in ("", "prefill", "decode") else "right", no_wrap=True)
        for answer in self._answers:
            served = answer.served
            table.add_row(
                answer.note,
                f"{len(answer.prompt_ids):,}",
                *(f"{served.get(f'cached_{where}', 0):,}" for where in ("own", "local", "remote")),
                "[green]warm[/]" if self._reused(answer) else "[blue]cold[/]",
                f"{answer.ttft_s:.2f}",
                f"{answer.tbt_ms:.0f}",
                *(str(served.get(what, "?")) for what in ("prefill", "decode")),
            )
        return table

    def _judge(self, up: Up) -> int:
        later = self._answers[1:]
        pids: dict[str, set[int | None]] = {}
        after_restart = False
        for answer in self._answers:
            known = pids.setdefault(str(answer.served["prefill"]), set())
            after_restart = after_restart or bool(known and answer.pid not in known and self._reused(answer))
            known.add(answer.pid)
        checks = (
            (
                all(self._reused(answer) for answer in later),
                f"every later question reused at least {REUSE_WANTED:.0%} of the prefix",
            ),
            (any(int(answer.served["cached_remote"]) > 0 for answer in later), "one was served by the other host's cache-node"),
            (after_restart, "one was warm after its prefill process was restarted"),
        )
        for good, what in checks:
            up.say(f"[green]yes[/]  {what}" if good else f"[red]NO[/]   {what}")
        return 0 if all(good for good, _ in checks) else 1


class VllmDemo(Demo):
    """Asks the same questions of vLLMs, one of which is killed during an answer."""

    def _ask_all(self, up: Up) -> None:
        up.say(f"one document, {len(QUESTIONS)} questions; every question repeats the whole document")
        first = self._ask(up, QUESTIONS[0], "cold")
        self._ask(up, QUESTIONS[1], "again")
        victim = f"{first.served['prefill']}.server"
        killed = threading.Timer(KILL_S, lambda: up.signal(victim, signal.SIGKILL))
        up.say(f"[cyan]kill -9 of {victim}[/], a vLLM, {KILL_S} s after the next question: another goes on with the answer")
        killed.start()
        self._ask(up, QUESTIONS[2], "killed")
        killed.join()
        self._ask(up, QUESTIONS[3], "without it")

    def _judge(self, up: Up) -> int:
        first, again, *later = self._answers
        checks = (
            (self._reused(again), f"the second question reused at least {REUSE_WANTED:.0%} of the prefix"),
            (again.served["prefill"] == first.served["prefill"], "it went to the vLLM that had it"),
            (all(answer.arrivals for answer in later), "with a vLLM killed, every question was answered to its end"),
        )
        for good, what in checks:
            up.say(f"[green]yes[/]  {what}" if good else f"[red]NO[/]   {what}")
        return 0 if all(good for good, _ in checks) else 1


def _engines(up: Up) -> set[str]:
    """Return the prefills and decodes that the gateway is connected to."""
    peers = (up.health() or {}).get("peers", {})
    return {name for role in ENGINES for name in peers.get(role, ())}


def _engines_elsewhere(up: Up) -> list[str]:
    """Return the prefills and decodes that are not on the first prefill's host."""
    home = up.config.of_role("prefill")[0].host
    return [node.name for role in ENGINES for node in up.config.of_role(role) if node.host != home]


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with (
        httpx.Client(timeout=REQUEST_TIMEOUT_S) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.status_code == 503 and "retry-after" in response.headers:
            raise ComeAgain(float(response.headers["retry-after"]))
        if response.status_code != 200:
            response.read()
            raise DemoFailed(f"HTTP {response.status_code}: {response.text[:300]}")
        for event in EventSource(response).iter_sse():
            if event.data != "[DONE]":
                yield event.json()
