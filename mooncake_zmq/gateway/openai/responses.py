"""Responses of the OpenAI API: a call's answers as JSON, whole or as server-sent events."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from mooncake_zmq.gateway.openai.bodies import ChatBody
from mooncake_zmq.gateway.openai.detokenizer import Choice, Piece
from mooncake_zmq.gateway.openai.errors import RequestError
from mooncake_zmq.gateway.openai.logprobs import of_chat, of_completion
from mooncake_zmq.gateway.openai.prepare import Prepared
from mooncake_zmq.gateway.openai.tools import call_deltas, whole_calls
from mooncake_zmq.gateway.requests.client_events import Finished
from mooncake_zmq.gateway.served_model import ServedModel
from mooncake_zmq.kv.codec import EXACT

AS_JSON: Final = msgspec.json.encode
REASONING = "reasoning_content"
"""The name of the reasoning in a message, as most clients read it."""
LONG_SCORES = 2048
"""Probabilities in a body that takes long to write: half a millisecond or more."""
LONG_IDS = 16_384
"""Token ids of prompts of which the same is true, or tokens of answers."""


class Reply:
    """The JSON of one HTTP call, whole or in chunks."""

    def __init__(
        self, prepared: Prepared, model: ServedModel, *, request_id: str, created: int, shows_reuse: bool = True
    ) -> None:
        """Begin a reply. `shows_reuse`: whether it says how much of the prompts was cached."""
        self.body = prepared.body
        self.choices = prepared.choices
        self._model = model
        self._chat = isinstance(self.body, ChatBody)
        self._request_id = request_id
        self._shows_reuse = shows_reuse
        self._of_kept = prepared.of_kept
        self._says_text_alone = self.body.likeliest is None and not self.body.continuous_usage
        self._forms: list[dict[str, list[bytes]]] = [{} for _ in self.choices]
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "object": ("chat.completion" if self._chat else "text_completion"),
            "created": created,
            "model": model.id,
        }

    @property
    def done(self) -> bool:
        return all(choice.settled for choice in self.choices)

    @property
    def is_long(self) -> bool:
        """True if the next part has the scores of whole prompts, or many of their ids, which take long to write."""
        new = [choice for choice in self.choices if choice.has_news and not choice.pieces_taken]
        ids = sum(len(choice.prompt_ids) for choice in new) if self.body.return_token_ids else 0
        return ids > LONG_IDS or any(choice.has_prompt for choice in new)

    @property
    def is_long_as_whole(self) -> bool:
        """True if the body of a call that does not stream takes long to write: it has many probabilities or tokens."""
        tokens = self.completion_tokens
        scores = 0 if self.body.likeliest is None else tokens * (1 + self.body.likeliest)
        return scores > LONG_SCORES or tokens > LONG_IDS or self.is_long

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompts. A prompt counts once, however many choices it has: it is computed once."""
        return sum(len(choice.prompt_ids) for choice in self._first_choices)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of all choices so far that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    def whole(self) -> dict[str, Any]:
        """Return the body of a call that does not stream."""
        body: dict[str, Any] = {**self._head, "choices": [self._choice(choice) for choice in self.choices]}
        if self._chat and self.body.return_token_ids:
            body["prompt_token_ids"] = self.choices[0].prompt_ids.tolist()
        return {**body, "usage": self.usage(), "mooncake": self._served()}

    def encoded(self) -> bytes:
        """Return the same as JSON."""
        return msgspec.json.encode(self.whole())

    def news(self) -> bytes:
        """Return everything new, as server-sent events."""
        return b"".join([self._events(choice) for choice in self.choices if choice.has_news])

    def _events(self, choice: Choice) -> bytes:
        alone = choice.next_alone
        if not alone or not self._says_text_alone:
            return b"".join(map(server_sent, self._chunks(choice)))
        forms = self._forms[choice.index]
        form = forms.get(alone)
        if form is None:
            form = forms[alone] = self._form(choice, "content" if alone == "text" else REASONING)
        text, ids = choice.take_alone()
        written = _one_line(AS_JSON(text))
        if len(form) == 2:
            return form[0] + written + form[1]
        return b"".join([form[0], written, form[1], AS_JSON(ids), form[2]])

    def _form(self, choice: Choice, name: str) -> list[bytes]:
        """A chunk of this choice as it is written, cut where its text stands, and its token ids: nothing else changes from
        token to token. `name`: the text's in a chat."""
        content = {"delta": {name: _TEXT}} if self._chat else {"text": _TEXT}
        ids = {"token_ids": _TEXT} if self.body.return_token_ids else {}
        return server_sent(self._chunk(choice, content, ids=ids)).split(msgspec.json.encode(_TEXT))

    def _chunks(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The first output always says something: a client times it."""
        first = choice.pieces_taken == 0
        piece = choice.take()
        if first and self._chat:
            chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
            if self.body.return_token_ids:
                chunk["prompt_token_ids"] = choice.prompt_ids.tolist()
            yield chunk
        shows_ids = self.body.return_token_ids or self.body.continuous_usage or piece.logprobs
        said = piece.text or piece.calls or piece.reasoning or choice.finish_reason
        if not (said or (first and not self._chat) or (shows_ids and piece.token_ids)):
            return
        content = {"delta": self._delta(choice, piece)} if self._chat else {"text": piece.text}
        ids: dict[str, Any] = {}
        if self.body.return_token_ids:
            ids["token_ids"] = piece.token_ids
            if first and not self._chat:
                ids["prompt_token_ids"] = choice.prompt_ids.tolist()
        chunk = self._chunk(choice, content, piece, ids)
        if piece.calls and choice.finish_reason:  # what ends with the chunk that brought it, OpenAI's client overlooks
            chunk["choices"][0]["finish_reason"] = None
            chunk["choices"][0].pop("weight_versions", None)
            yield chunk
            chunk = self._chunk(choice, {"delta": {}}, choice.take())
        yield chunk

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {REASONING: piece.reasoning} if piece.reasoning else {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = call_deltas(piece.calls, self._call_salt(choice))
        return delta

    def _call_salt(self, choice: Choice) -> str:
        """Salt that makes the ids of its tool calls unique."""
        return f"{self._head['id']}/{choice.index}"

    def _message(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.reasoning:
            message[REASONING] = piece.reasoning
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = whole_calls(piece.calls, self._call_salt(choice))
        return message

    def ending(self) -> bytes:
        """Return the end of a stream, with its usage when asked for."""
        return (server_sent(self.usage_chunk()) if self.body.include_usage else b"") + DONE

    def failure(self, error: RequestError) -> bytes:
        """Return the event of an answer that failed after it had begun."""
        return server_sent(error.body())

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk before [DONE], when asked for."""
        return {**self._chunk_head(), "choices": [], "usage": self.usage(), "mooncake": self._served()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        piece = choice.take()
        text = {"message": self._message(choice, piece)} if self._chat else {"text": piece.text}
        ending = {"logprobs": self._logprobs(piece), "finish_reason": choice.finish_reason}
        whole: dict[str, Any] = {"index": choice.index, **text, **ending}
        if self.body.return_token_ids:
            whole["token_ids"] = piece.token_ids
            if not self._chat:
                whole["prompt_token_ids"] = choice.prompt_ids.tolist()
        return whole | _versions(choice)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.body.likeliest is None:
            return None
        if self._chat:
            return of_chat(piece.token_ids, [each for each in piece.logprobs if each], self._model.tokenizer.piece)
        ids = [*piece.echoed_ids, *piece.token_ids]
        return of_completion(ids, piece.logprobs, piece.offsets, self._model.tokenizer.piece)

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head

    def _chunk(
        self, choice: Choice, content: dict[str, Any], piece: Piece | None = None, ids: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        ending = {"logprobs": piece and self._logprobs(piece), "finish_reason": piece and choice.finish_reason}
        versions = _versions(choice) if piece and choice.finish_reason else {}
        said = {"index": choice.index, **content, **ending, **(ids or {}), **versions}
        chunk = {**self._chunk_head(), "choices": [said]}
        if self.body.continuous_usage:
            chunk["usage"] = _usage(len(choice.prompt_ids), choice.completion_tokens)
        return chunk

    @property
    def _first_choices(self) -> list[Choice]:
        """The first choice of each prompt."""
        return self.choices[:: self.body.choices_per_prompt]

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens, and how many were cached once that is known."""
        usage = _usage(self.prompt_tokens, self.completion_tokens)
        if any(choice.may_reason for choice in self.choices):
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        served = self._served() if self._shows_reuse else None
        cached = served and {"cached_tokens": served["cached_own"] + served["cached_local"] + served["cached_remote"]}
        return {**usage, "prompt_tokens_details": cached}

    def _unread(self) -> dict[str, str]:
        """Return why vLLM's parsers did not read an answer, so that its text is as the model wrote it; empty: they did."""
        reason = next((choice.unread_reason for choice in self.choices if choice.unread_reason), "")
        return {"unread": reason} if reason else {}

    def _served(self) -> dict[str, Any] | None:
        """The nodes and attempts of the first choice, and what was reused, if the client may know that. None where that is not
        known."""
        finished = [choice.finished for choice in self._first_choices if choice.finished is not None]
        if len(finished) < len(self._first_choices):
            return None
        reused = {
            "cached_own": sum(each.cached_own for each in finished),
            "cached_local": sum(each.cached_local for each in finished),
            "cached_remote": sum(each.cached_remote for each in finished),
        }
        return {
            **(reused if self._shows_reuse else dict.fromkeys(reused)),
            "prefill": finished[0].prefill,
            "decode": finished[0].decode,
            "attempts": finished[0].attempts,
            "relocations": finished[0].relocations,
            **self._coded(sum(reused.values())),
            **self._unread(),
            **self._met(sum(each.computed_of_cached for each in finished)),
            **self._approximate(finished),
            **self._borrowed(),
            **self._of_kept(),
            "request": self._request_id,
        }

    def _met(self, tokens: int) -> dict[str, int]:
        """Return how many tokens with KV elsewhere were computed while KV after them was fetched; empty: none."""
        return {"computed_of_cached": tokens} if tokens and self._shows_reuse else {}

    def _borrowed(self) -> dict[str, int]:
        """Return of how many tokens other decodes held the KV; empty: of none."""
        tokens = sum([choice.finished.borrowed_tokens for choice in self.choices if choice.finished is not None])
        return {"borrowed_tokens": tokens} if tokens else {}

    def _approximate(self, firsts: Sequence[Finished]) -> dict[str, Any]:
        """Return that the answer is approximate, if a choice is; how many of the prompts' tokens have KV that was computed
        behind other tokens, or were computed again; and how many were kept and dropped, if any were. Empty: none is. `firsts`:
        of each prompt's first choice."""
        ends = [choice.finished for choice in self.choices if choice.finished is not None]
        if not any(end.is_approximate for end in ends):
            return {}
        parts, recomputed = sum(each.parts for each in firsts), sum(each.recomputed for each in firsts)
        is_blended = any(end.parts for end in ends)
        shown = {"cached_parts": parts, "recomputed": recomputed} if is_blended and self._shows_reuse else {}
        return {"approximate": True, **shown, **self._dropped(firsts)}

    def _dropped(self, firsts: Sequence[Finished]) -> dict[str, int]:
        """Return how many of the prompts' tokens were kept, the bytes of their KV, and how many were dropped; empty: none."""
        dropped = sum([each.dropped for each in firsts])
        kept = sum([each.prompt_tokens for each in firsts]) - dropped
        of_kept = {"kept_tokens": kept, "kept_bytes": kept * self._model.kv_bytes_per_token}
        return {**of_kept, "dropped_tokens": dropped} if dropped else {}

    def _coded(self, reused: int) -> dict[str, Any]:
        """Return how blocks hold KV, and whether the answer may for that reason differ from one that was computed at once;
        empty: they hold it exactly. `reused`: tokens whose KV was loaded."""
        if self._model.kv_codec == EXACT:
            return {}
        ends = [choice.finished for choice in self.choices if choice.finished is not None]
        moved = any(end.attempts + end.relocations > 1 for end in ends)
        # What was loaded for an answer that is given again is not known.
        may_differ = moved or (self._model.rounds_late and (reused > 0 or "answered_from" in self._of_kept()))
        return {
            "kv_codec": self._model.kv_codec,
            "kv_bytes_per_token": self._model.kv_bytes_per_token,
            "approximate": may_differ if self._shows_reuse else None,
        }


def _versions(choice: Choice) -> dict[str, Any]:
    """Return the versions of the weights that made a complete answer's tokens, if an engine named any, in vLLM's own form."""
    count, given = choice.completion_tokens, choice.finished.versions if choice.finished is not None else ()
    spans = [{"version": name, "start": start, "end": min(stop, count)} for name, start, stop in given if start < count]
    return {"weight_versions": spans} if spans else {}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def server_sent(event: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _one_line(msgspec.json.encode(event)) + b"\n\n"


def _one_line(written: bytes) -> bytes:
    """JSON without what clients may take for the end of a line."""
    if not written.isascii():
        for raw, escaped in LINE_ENDS:
            written = written.replace(raw, escaped)
    return written


_TEXT = "\0text"
"""Placeholder for the text of a chunk; no model's name has such a character."""
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
"""The headers of a stream of events."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of events skip."""
LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
"""Characters that JSON permits in a string, but that some clients take for the end of a line."""
