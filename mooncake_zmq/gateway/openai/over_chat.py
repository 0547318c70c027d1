"""The common base of replies of APIs over a chat: one choice, whose parts begin and end one after the other."""

from mooncake_zmq.gateway.openai.answer_parts import AnswerParts
from mooncake_zmq.gateway.openai.prepare import Prepared
from mooncake_zmq.gateway.openai.responses import Reply
from mooncake_zmq.gateway.served_model import ServedModel


class OverChat:
    """The reply of a call that was translated into a chat. `choices` has one choice, without probabilities."""

    is_long = is_long_as_whole = False
    """Whether a part takes long to write."""
    repeats_text = False
    """Whether the end of a stream repeats its text."""

    def __init__(
        self, prepared: Prepared, model: ServedModel, *, request_id: str, created: int, shows_reuse: bool = True
    ) -> None:
        """Begin a reply. `shows_reuse`: whether it says how much of the prompt was cached."""
        self.body = prepared.body
        self.choices = prepared.choices
        self._chat = Reply(prepared, model, request_id=request_id, created=created, shows_reuse=shows_reuse)
        self._parts = AnswerParts(request_id, keeps_text=self.repeats_text or not prepared.body.stream)

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._chat.done

    @property
    def prompt_tokens(self) -> int:
        """The number of the prompt's tokens."""
        return self._chat.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return self._chat.completion_tokens

    def _take_whole(self) -> None:
        """Take all of the answer into its parts."""
        (choice,) = self.choices
        for _ in self._parts.push(choice.take()):
            pass

    def _cached_tokens(self) -> int:
        """Return how many of the prompt's tokens were loaded; 0 where the client may not know."""
        details = self._chat.usage()["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0
