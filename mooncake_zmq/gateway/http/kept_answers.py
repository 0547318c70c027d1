"""How calls use the table of kept answers."""

from array import array

from mooncake_zmq.gateway.answers.table import Answer, AnswerTable, Question, Stored
from mooncake_zmq.gateway.openai.detokenizer import Choice
from mooncake_zmq.gateway.openai.prepare import Prepared
from mooncake_zmq.kv.block_hash import pack_tokens


def look_up(table: AnswerTable | None, prepared: Prepared) -> Stored | Question | None:
    """Return an answer that was given before, or the question whose answer is to be kept; None: neither."""
    if table is None or prepared.asked is None:
        return None
    found = table.look_up(prepared.asked)
    if isinstance(found, Question):
        prepared.choices[0].kept = array("i")
    return found


def settle(table: AnswerTable | None, found: Stored | Question | None, choice: Choice, now: float) -> None:
    """Keep the answer of an engine to a question, if it is complete. `now`: seconds since 1970."""
    reason, end = choice.finish_reason, choice.finished
    if table is not None and isinstance(found, Question) and choice.kept is not None and reason and end is not None:
        table.settle(found, Answer(pack_tokens(choice.kept), reason, end), now)
