"""The clients of the gateways: they ask, hang up, retry when their gateway dies, and check every answer against I3."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.gateway.requests.client_events import (
    ClientGone,
    Failed,
    Finished,
    PromptLogprobs,
    Rendered,
    TextRead,
    TextUnread,
    TokenOut,
    Vectors,
)
from mooncake_zmq.kv.block_hash import pack_tokens, unpack_tokens
from mooncake_zmq.simulation.engine import logprob_of
from mooncake_zmq.simulation.images import chat_of
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.traces import Answer, Chat, Turn
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.vllm_works import read_as, vectors_of

MAX_TRIES = 6
RETRY_S = 0.4
MAX_RETRY_S = 1.5


@dataclass(slots=True)
class _Open:
    """One request as its client sees it."""

    request_id: str
    gateway: str
    asked_at: float
    answer: Answer
    scored: int = 0
    """The number of the prompt's tokens whose probabilities it has."""
    received: list[int] = field(default_factory=list)
    rendered: bool = False
    """Whether it has the tokens of its chat, if that has images."""
    embedded: int = 0
    """How often it has vectors."""
    text: str = ""
    """The text of its answer, if vLLMs read it."""
    unread: str = ""
    """Why they do not read the rest; empty: they do."""


class Client:
    """One chat: a turn after the other, each tried again if its gateway dies or sends it away."""

    def __init__(
        self,
        simulator: Simulator,
        gateways: Sequence[str],
        chat: Chat,
        *,
        name: str,
        outcomes: Counter[str],
        limit_s: float,
    ) -> None:
        self.over = False
        self._limit_s = limit_s
        self._simulator = simulator
        self._gateways = gateways
        self._chat = chat
        self._outcomes = outcomes
        self._name = name
        self._turn = 0
        self._try = 0
        self._open: dict[str, _Open] = {}
        """The choices of the turn that have not ended."""
        self._received_any = False
        """Whether any of them has a token."""
        self.ids: dict[str, str] = {}
        """Every request ever made -> how it ended ("" while it has not)."""
        simulator.at(max(simulator.now, chat.starts_at), self._ask)

    @property
    def waiting(self) -> str | None:
        """Return the request that has not ended yet, and for how long."""
        request = next(iter(self._open.values()), None)
        return None if request is None else f"{request.request_id} at {request.gateway} since {request.asked_at:.2f}"

    def gateway_died(self, name: str) -> None:
        """Ask again elsewhere, as a new request, since the connection broke."""
        mine = [request for request in self._open.values() if request.gateway == name]
        for request in mine:
            self._end(request, "disconnected")
        if mine:
            self._again(RETRY_S)

    def receive(self, request_id: str, output: Any) -> None:
        """Check I3 and I4: every token once, in order, as the undisturbed run gives it; then one end, and nothing after it."""
        request = self._open.get(request_id)
        if request is None:
            raise Violation("I3", f"{request_id} is sent {output} after its end ({self.ids[request_id]})")
        turn = self._chat.turns[self._turn]
        match output:
            case Rendered():
                self._rendered(turn, request, output)
            case PromptLogprobs():
                self._scored(turn, request, output)
            case Vectors(vectors):
                embedding = turn.request.embedding
                if embedding is None or vectors != vectors_of(turn.request.tokens, embedding, turn.request.root):
                    raise Violation("I3", f"{request.request_id} is sent other vectors than those of its texts")
                request.embedded += 1
            case TokenOut(index, token, logprob):
                if turn.request.prompt_logprobs is not None and request.scored != len(turn.request.tokens) // 4 - 1:
                    raise Violation("I3", f"{request.request_id} has {request.scored} of its prompt's probabilities")
                self._token(request, index, token)
                length = len(turn.request.tokens) // 4 + index
                if logprob != logprob_of(token, length, turn.request.sampling):
                    raise Violation("I3", f"{request.request_id} token {index} is sent with {logprob}")
                if request.request_id == self._first_id and turn.cancel_after_tokens == len(request.received):
                    self._hang_up([request] if turn.cancel_alone else list(self._open.values()))
            case TextRead(_, text, _):
                request.text += text
                self._check_text(turn, request)
            case TextUnread(reason):
                request.unread = reason
                self._outcomes["unread"] += 1
            case Finished():
                self._check_text(turn, request)
                self._finished(turn, request, output)
            case Failed(status=status, retry_after_s=retry_after_s):
                busy = status in (429, 503) and not self._received_any
                self._end(request, "rejected" if busy else "error")
                self._leave(list(self._open.values()))  # one failed choice fails the call
                if busy and self._try + 1 < MAX_TRIES:
                    self._again(min(retry_after_s or RETRY_S, MAX_RETRY_S))
                else:
                    self._outcomes["given up" if busy else f"error {output.code}"] += 1
                    self._next(turn)
            case _:
                raise Violation("I3", f"{request_id} is sent {output!r}")

    def _rendered(self, turn: Turn, request: _Open, output: Rendered) -> None:
        """Ask for the answer to a chat that a vLLM has written."""
        asked = turn.request
        bare = tuple([structs.replace(image, url=b"") for image in asked.images])
        if request.rendered or (output.tokens, output.images) != (asked.tokens, bare):
            raise Violation("I3", f"{request.request_id} is sent {output} of a chat with {asked.images}")
        request.rendered = True
        self._outcomes["rendered"] += 1
        self._simulator.from_client(request.gateway, request.request_id, asked)

    def _check_text(self, turn: Turn, request: _Open) -> None:
        """Check that vLLMs have read each token that has a text, once and in order."""
        reading = turn.request.reading
        if reading is None or request.unread:
            return
        expected = read_as(pack_tokens([token for token in request.received if token not in reading.textless]), 0)
        if request.text != expected:
            raise Violation("I3", f"{request.request_id} reads {request.text!r} where its tokens are {expected!r}")

    def _scored(self, turn: Turn, request: _Open, output: PromptLogprobs) -> None:
        tokens, sampling = unpack_tokens(turn.request.tokens), Sampling(logprobs=turn.request.prompt_logprobs)
        due = range(request.scored + 1, request.scored + 1 + len(output.logprobs))
        if output.first != due.start or output.logprobs != tuple(logprob_of(tokens[at], at, sampling) for at in due):
            raise Violation("I3", f"{request.request_id} is sent {output} of its prompt where {due.start} comes next")
        request.scored = due.stop - 1

    def _token(self, request: _Open, index: int, token: int) -> None:
        answer = request.answer.tokens
        expected = len(request.received)
        if index != expected:
            raise Violation("I3", f"{request.request_id} is sent token {index} where {expected} comes next")
        if index >= len(answer) or token != answer[index]:
            raise Violation("I3", f"{request.request_id} token {index} is {token}, undisturbed: {answer[index : index + 1]}")
        request.received.append(token)
        self._received_any = True

    def _finished(self, turn: Turn, request: _Open, end: Finished) -> None:
        got, prompt, answer = len(request.received), len(turn.request.tokens) // 4, request.answer
        if (got, end.reason) != (len(answer.tokens), answer.reason) or (end.completion_tokens, end.prompt_tokens) != (
            got,
            prompt,
        ):
            raise Violation("I3", f"{request.request_id} ends after {got} tokens with {end}, undisturbed: {answer.reason}")
        if request.embedded != (turn.request.embedding is not None):
            raise Violation("I3", f"{request.request_id} ends after {request.embedded} answers of vectors")
        if request.embedded:
            self._outcomes["finished with vectors"] += 1
        cached = end.cached_own + end.cached_local + end.cached_remote
        if cached >= max(1, prompt):
            raise Violation("I3", f"{request.request_id} has {cached} of {prompt} prompt tokens from caches")
        if end.attempts > 1:
            self._outcomes["finished after resume"] += 1
        for source in ("own", "local", "remote"):
            if getattr(end, f"cached_{source}"):
                self._outcomes[f"finished with {source} blocks"] += 1
        self._end(request, "finished")
        if not self._open:
            self._outcomes["finished"] += 1
            self._outcomes["finished with choices"] += len(turn.answers) > 1
            self._next(turn)

    @property
    def _first_id(self) -> str:
        return f"{self._name}.{self._turn}.{self._try}"

    def _ask(self) -> None:
        turn = self._chat.turns[self._turn]
        random = self._simulator.random
        gateway = random.choice(self._gateways)
        if self._simulator.processes[gateway].current is None:
            self._simulator.at(self._simulator.now + RETRY_S, self._ask)
            return
        self._received_any = False
        first, asked_at = self._first_id, self._simulator.now
        for place, answer in enumerate(turn.answers):
            request_id = f"{first}.{place}" if place else first
            self.ids[request_id] = ""
            self._open[request_id] = _Open(request_id, gateway, asked_at, answer)
        requests = list(self._open.values())
        siblings = tuple((request.request_id, request.answer.seed) for request in requests[1:])
        asked = structs.replace(turn.request, siblings=siblings, call=first if siblings else "")
        self._simulator.from_client(gateway, first, chat_of(asked) if asked.images else asked)
        if turn.cancel_after_s is not None:
            self._simulator.at(asked_at + turn.cancel_after_s, lambda: self._hang_up(requests))

    def _hang_up(self, requests: Sequence[_Open]) -> None:
        if not self._leave(requests):
            return
        self._outcomes["cancelled"] += 1
        if not self._open:
            self._next(self._chat.turns[self._turn])

    def _leave(self, requests: Sequence[_Open]) -> bool:
        """Abandon requests; return whether any of them had not ended."""
        left = [request for request in requests if self._open.get(request.request_id) is request]
        for request in left:
            self._simulator.from_client(request.gateway, request.request_id, ClientGone())
            self._end(request, "cancelled")
        return bool(left)

    def _again(self, delay_s: float) -> None:
        self._try += 1
        self._simulator.at(self._simulator.now + delay_s, self._ask)

    def _next(self, turn: Turn) -> None:
        self._turn += 1
        self._try = 0
        if self._turn == len(self._chat.turns):
            self.over = True
        else:
            self._simulator.at(self._simulator.now + turn.think_s, self._ask)

    def _end(self, request: _Open, how: str) -> None:
        took_s = self._simulator.now - request.asked_at
        if took_s > self._limit_s:
            raise Violation("I4", f"{request.request_id} ended only after {took_s:.1f} s")
        self.ids[request.request_id] = how
        del self._open[request.request_id]


class Clients:
    """All clients of a run."""

    def __init__(self, simulator: Simulator, gateways: Sequence[str], *, limit_s: float) -> None:
        """`limit_s`: the time within which every request ends."""
        self._limit_s = limit_s
        self._simulator = simulator
        self._gateways = gateways
        self._clients: list[Client] = []
        simulator.to_client = self._deliver
        simulator.on_death = self._gateway_died

    @property
    def waiting(self) -> list[str]:
        """Return requests that have not ended; chats between turns count too."""
        return [client.waiting or "between turns" for client in self._clients if not client.over]

    def add(self, chats: Sequence[Chat]) -> Counter[str]:
        """Begin more chats; return how they will have ended."""
        outcomes: Counter[str] = Counter()
        for chat in chats:
            name = f"chat{len(self._clients)}"
            client = Client(self._simulator, self._gateways, chat, name=name, outcomes=outcomes, limit_s=self._limit_s)
            self._clients.append(client)
        return outcomes

    def _deliver(self, gateway: str, request_id: str, output: Any) -> None:
        client = self._clients[int(request_id.split(".")[0].removeprefix("chat"))]
        if client.ids.get(request_id) == "cancelled" and request_id not in self._simulator.watcher.known_gone:
            return  # sent before the gateway learned of the hang-up
        client.receive(request_id, output)

    def _gateway_died(self, name: str) -> None:
        for client in self._clients:
            client.gateway_died(name)
