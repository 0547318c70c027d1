"""The row of `bench gateway` on long chats: the time to make a request of a body, in this process."""

import random
import time
from collections.abc import Callable
from statistics import median

import msgspec

from mooncake_zmq.bench.report import Report
from mooncake_zmq.engine.key_cache import KeyCache
from mooncake_zmq.engine.prepare import prepare as prepare_model
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.gateway.openai.bodies import ChatBody
from mooncake_zmq.gateway.openai.prepare import prepare
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import EdgeSettings

TOKENS = 100_000
"""Tokens of the chat, in messages of `MESSAGE_WORDS` words each."""
MESSAGE_WORDS = 400
WORD_LETTERS = (1, 9)
BLOCK_TOKENS = 16
ASKED = 5
"""Turns that are measured in a round."""


def chats(report: Report, rounds: int, progress: Callable[[str], None]) -> None:
    """Measure the next turns of a chat of 100,000 tokens, beside the same chat in a gateway that has seen none of it: body,
    template, tokens, block keys. Raises ModelError."""
    path = prepare_model("default", "", lambda what, share: progress(what))
    later, first = [], []
    for number in range(rounds):
        progress(f"a chat of {TOKENS:,} tokens, round {number + 1} of {rounds}")
        rand = random.Random(number)
        tokenizer = open_tokenizer(path)
        model = ServedModel(
            id="default",
            max_model_len=2 * TOKENS,
            vocab_size=tokenizer.vocab_size,
            block_tokens=BLOCK_TOKENS,
            model_fingerprint="m",
            layout_fingerprint="l",
            tokenizer=tokenizer,
            extend_keys=KeyCache().extend,
        )
        messages = [_message(rand, "user")]
        while len(tokenizer.chat(messages)) < TOKENS:
            messages += [_message(rand, "assistant") for _ in range(20)]
        first.append(_prepared_s(messages, model))
        for _ in range(ASKED):
            messages += [_message(rand, "assistant"), _message(rand, "user")]
            later.append(_prepared_s(messages, model))
        progress(f"  {1e3 * first[-1]:.0f} ms at first, {1e3 * median(later[-ASKED:]):.1f} ms a further turn")
    name = f"a request of a chat's next turn, {TOKENS:,} tokens / at first"
    report.row(name, "ms", 1e3 * median(later), 1e3 * median(first))


def _message(rand: random.Random, role: str) -> dict[str, str]:
    words = ("".join(rand.choices("etaoinshrdlu", k=rand.randint(*WORD_LETTERS))) for _ in range(MESSAGE_WORDS))
    return {"role": role, "content": " ".join(words)}


def _prepared_s(messages: list[dict[str, str]], model: ServedModel) -> float:
    body = bytearray(msgspec.json.encode({"model": model.id, "messages": messages, "max_tokens": 8}))
    began = time.perf_counter()
    prepare(body, ChatBody, ServedModels(model), EdgeSettings(), lambda: 0)
    return time.perf_counter() - began
