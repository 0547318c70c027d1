"""How one call uses the table of kept answers."""

import time
from array import array
from typing import Any

from msgspec import structs

from mooncake_zmq.gateway.answers.table import Answer, AnswerTable, Question, Stored
from mooncake_zmq.gateway.openai.prepare import Prepared
from mooncake_zmq.kv.block_hash import pack_tokens


class Asking:
    """One call of a gateway that may keep answers: it is given one, or its own is kept, on leaving this at the latest."""

    def __init__(self, table: AnswerTable | None, prepared: Prepared, *, takes_part: bool) -> None:
        """`table`: None where no answers are kept. `takes_part`: whether the caller may learn what others asked."""
        self._table, self._choice, self._model = table, prepared.choices[0], prepared.requests[0].model
        self._version = table.version(self._model) if table is not None else ""
        self._kept: bool | None = None
        self.found: Stored | Question | None = None
        """The answer that was given before, or the question whose answer is to be kept; None: neither."""
        if table is not None and prepared.asked is not None and takes_part:
            self.found = table.look_up(prepared.asked)
            self._choice.kept = array("i") if isinstance(self.found, Question) else None

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *_error: object) -> None:
        self.outcome()

    def outcome(self) -> dict[str, Any]:
        """Keep an engine's answer if it is complete, and note its weights. Return what the reply says of kept answers. Where
        one is given nothing is loaded: it has no counts of cached tokens."""
        found, choice, end = self.found, self._choice, self._choice.finished
        if isinstance(found, Stored):
            return {"answered_from": "cache", "verified_at": int(found.verified_at)}
        if found is None or self._table is None:
            if self._table is not None and end is not None:
                self._table.renew(self._model, self._version, end)
            return {}
        if self._kept is None:
            fresh = None
            # One over KV of other prompts is not kept: a plain stream, which cannot say so, has the same key.
            if choice.kept is not None and choice.finish_reason and end is not None and not end.is_approximate:
                bare = structs.replace(end, cached_own=0, cached_local=0, cached_remote=0, computed_of_cached=0)
                fresh = Answer(pack_tokens(choice.kept), choice.finish_reason, bare)
            self._kept = self._table.settle(found, fresh, time.time())
        return {"kept": self._kept}
