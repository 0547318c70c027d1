"""A reply as a stream of server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Message, Scope, Send

from mooncake_zmq.gateway.anthropic.replies import MessagesReply
from mooncake_zmq.gateway.http.calls import Call
from mooncake_zmq.gateway.http.cluster_routes import HEADERS
from mooncake_zmq.gateway.openai.errors import RequestError
from mooncake_zmq.gateway.openai.responses import KEEP_ALIVE, Reply
from mooncake_zmq.gateway.requests.answer import TOKEN
from mooncake_zmq.gateway.requests.client_events import ClientOutput, Failed, Finished, Rendered, TextRead
from mooncake_zmq.gateway.responses_api.replies import ResponsesReply
from mooncake_zmq.gateway.settings import EdgeSettings

Encode = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""A function that writes the new part of a reply, perhaps in a thread."""
AnyReply = Reply | MessagesReply | ResponsesReply


class Stuck(Exception):
    """A client does not read any more, but its connection is open."""


class Stream:
    """A reply as server-sent events. Nothing is sent before the first output, so that an early failure has its own status,
    unless the first output takes long."""

    def __init__(self, call: Call, reply: AnyReply, scope: Scope, send: Send, encode: Encode, settings: EdgeSettings) -> None:
        self._call = call
        self._reply = reply
        self._send = send
        self._push: Callable[[bytes], bool] = scope["state"].get("push", _never)
        self._encode = encode
        self._settings = settings
        self._begun = False
        self._loop = asyncio.get_running_loop()
        self._said_at = self._loop.time()
        self._writing_since: float | None = None
        self._limit = asyncio.timeout(None)
        self._unsaid = b""
        call.shortcut = self._say_at_once

    async def run(self) -> None:
        self._look()
        try:
            async with self._limit:
                await self._send_reply()
        except TimeoutError:
            raise Stuck from None
        finally:
            self._timer.cancel()

    async def _send_reply(self) -> None:
        reply = self._reply
        try:
            while not reply.done:
                accept(self._call, reply, await self._next())
                await self._say(await self._news() if reply.is_long else reply.news())
        except RequestError as error:
            if not self._begun:
                raise
            await self._say(await self._news() + reply.failure(error), last=True)
            return
        await self._say(reply.ending(), last=True)

    async def _next(self) -> list[tuple[int, ClientOutput]]:
        """Return the next outputs, and send comments at intervals until they arrive: the prompt may be in computation, or
        another attempt may be starting."""
        while True:
            outputs = await self._call.take()
            unsaid, self._unsaid = self._unsaid, b""
            if unsaid or not outputs:
                await self._say(unsaid or KEEP_ALIVE)
            if outputs:
                return outputs

    def _say_at_once(self, outputs: list[tuple[int, ClientOutput]]) -> bool:
        """Write tokens of choices that have begun without waking the task, unless the client does not read for now: most
        outputs are such tokens. The first piece of a choice may repeat the prompt, and take long to write."""
        choices = self._reply.choices
        if not self._begun or not all(choices[index].pieces_taken for index, _ in outputs):
            return False
        if not accept_tokens(self._call, self._reply, outputs):
            return False
        events = self._reply.news()
        if not events:
            return True
        if self._push(events):
            self._said_at = self._loop.time()
        else:
            self._unsaid += events
            self._call.nudge()
        return True

    def _look(self) -> None:
        """Check the stream's timeouts, with one timer that is set again only when it fires: setting and cancelling a timer for
        each token would cost as much as the token."""
        now, settings = self._loop.time(), self._settings
        due = now + settings.send_timeout_s
        if self._writing_since is not None:
            due = self._writing_since + settings.send_timeout_s
            if due <= now:  # a client that takes nothing for long is as good as gone
                self._limit.reschedule(now)
                return
        elif settings.keep_alive_s:
            silent_since = self._said_at
            if silent_since + settings.keep_alive_s <= now:
                self._call.nudge()
                silent_since = now
            due = min(due, silent_since + settings.keep_alive_s)
        self._timer = self._loop.call_at(due, self._look)

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        await self._write({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def _news(self) -> bytes:
        return await self._encode(self._reply.news)

    async def _say(self, events: bytes, *, last: bool = False) -> None:
        if not events:
            return
        if last or not self._begun or not self._push(events):
            await self._begin()
            await self._write({"type": "http.response.body", "body": events, "more_body": not last})
        self._said_at = self._loop.time()

    async def _write(self, message: Message) -> None:
        self._writing_since = self._loop.time()
        await self._send(message)
        self._writing_since = None


def _never(_events: bytes) -> bool:
    """Stands in where the server takes only ASGI's messages."""
    return False


def accept(call: Call, reply: AnyReply, outputs: list[tuple[int, ClientOutput]]) -> None:
    """Feed the choices; raises RequestError at the first failure. One failed choice fails the call."""
    choices = reply.choices
    for index, output in outputs:
        choice = choices[index]
        if choice.has_ended:  # a stop string was found
            if isinstance(output, Failed) and not all(each.settled for each in reply.choices if each is not choice):
                raise RequestError.of(output)  # it may be of the whole call, and nothing follows then
            if isinstance(output, Finished | Failed):  # else it came before the actor learned of it
                choice.settle(output)
            continue
        if type(output) is not TOKEN:
            if isinstance(output, Failed):
                raise RequestError.of(output)
            assert not isinstance(output, Rendered), "a chat is written before it has an answer"
        choice.accept(output)
        if choice.was_cut:
            call.stop(index)


def accept_tokens(call: Call, reply: AnyReply, outputs: list[tuple[int, ClientOutput]]) -> bool:
    """Feed the choices, if all outputs are tokens and their text: no task has to wake for them. Else return False."""
    for _, output in outputs:
        if type(output) is not TOKEN and type(output) is not TextRead:
            return False
    accept(call, reply, outputs)
    return True
