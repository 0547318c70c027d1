"""Fits a trace to a server: finds requests that are longer than its model takes, and scales the trace so that none is."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from mooncake_zmq.bench.client import Client, NoServer, Replayed, Served, replay, served_by
from mooncake_zmq.bench.client_prompts import PromptForm
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival
from mooncake_zmq.refused import Refused

TEXT_SHARE = 0.9
"""Share of the model's context that prompts of words fill at most: some words are two tokens, and a chat template adds some."""
PROBE_BLOCKS = 1 << 61
"""Least hash id of the probe's prompt, which is drawn: no trace has it, so that nothing of the prompt is in a cache."""


class DoesNotFit(Refused):
    """The trace has requests that are longer than the model takes."""


async def send(
    client: Client,
    arrivals: Sequence[Arrival],
    fitting: Literal["fit", "as-is"] | None,
    keep_speed: bool,
    progress: Callable[[str], None],
) -> Replayed:
    """Replay a trace: scaled to the server, as it is, or only if all of it fits. Raises DoesNotFit, and what `fit` and `replay`
    raise."""
    if fitting == "fit":
        client, arrivals = await fit(client, arrivals, keep_speed, progress)
    elif fitting is None:
        served = await served_by(client)
        if text := misfit(arrivals, client.form, served):
            raise DoesNotFit(text)
        client = replace(client, model=served.model)  # not asked for again
    return await replay(client, arrivals, progress)


def too_long(arrivals: Sequence[Arrival], form: PromptForm, max_model_len: int) -> int:
    """Return how many requests are longer than the model takes, prompt and answer together."""
    return sum(1 for each in arrivals if form.length(each) + each.output_tokens > max_model_len)


def misfit(arrivals: Sequence[Arrival], form: PromptForm, served: Served) -> str:
    """Return a line that says how many requests the server cannot take and what to do; empty if all fit or it states no
    limit."""
    if served.max_model_len is None or not (count := too_long(arrivals, form, served.max_model_len)):
        return ""
    return (
        f"{count:,} of {len(arrivals):,} requests are longer than the {served.max_model_len:,} tokens that {served.model} takes"
        ": --fit scales the trace, --as-is sends it as it is"
    )


def scaled(arrivals: Sequence[Arrival], form: PromptForm, max_model_len: int) -> tuple[list[Arrival], PromptForm]:
    """Return the trace with prompts and answers shortened in one proportion, so that the longest fits. Raises StudyError."""
    room = int(max_model_len * TEXT_SHARE) if form.text else max_model_len
    longest = max((form.length(each) + each.output_tokens for each in arrivals), default=0)
    block_tokens = min(form.block_tokens, form.block_tokens * room // max(1, longest))
    while block_tokens >= 1:
        shorter = replace(form, block_tokens=block_tokens)
        share = block_tokens / form.block_tokens
        fitting = [replace(each, output_tokens=max(1, int(each.output_tokens * share))) for each in arrivals]
        if not too_long(fitting, shorter, room):
            return fitting, shorter
        block_tokens -= 1
    raise StudyError(f"the trace does not fit into {max_model_len:,} tokens: its longest request has {longest:,}")


async def fit(
    client: Client, arrivals: Sequence[Arrival], keep_speed: bool, say: Callable[[str], None]
) -> tuple[Client, list[Arrival]]:
    """Return the client and the trace scaled to what the server takes. Unless `keep_speed`, arrivals are slowed to the
    rate at which the server answers requests of mean length one after the other. Raises NoServer and StudyError."""
    served = await served_by(client)
    if served.max_model_len is None:
        raise NoServer(f"{client.url}/v1/models states no max_model_len to fit the trace to: use --block-tokens and --as-is")
    fitting, form = scaled(arrivals, client.form, served.max_model_len)
    fitted = replace(client, model=served.model, form=form)
    said = [f"a hash id stands for {form.block_tokens} tokens ({client.form.block_tokens})"]
    if form.block_tokens < client.form.block_tokens:
        said.append(f"answers have {form.block_tokens / client.form.block_tokens:.3g} of their tokens")
    if not keep_speed:
        alone_s = await _alone_s(fitted, fitting)
        speed = slowed(client.speed, fitting, alone_s)
        fitted = replace(fitted, speed=speed)
        said.append(f"arrivals come {speed:.3g} times as fast: a request of mean length alone took {alone_s:.2f} s")
    say(f"fitted to {served.max_model_len:,} tokens: {'; '.join(said)}")
    return fitted, fitting


def slowed(speed: float, arrivals: Sequence[Arrival], alone_s: float) -> float:
    """Return the speed at which requests come no closer together, on average, than `alone_s`; at most `speed`."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    return min(speed, span_s / (len(arrivals) - 1) / alone_s) if span_s > 0 else speed


async def _alone_s(client: Client, arrivals: Sequence[Arrival]) -> float:
    """Return how long the server takes for one request of mean length that finds nothing in a cache."""
    count = len(arrivals)
    tokens = sum(each.input_tokens for each in arrivals) // count
    first = PROBE_BLOCKS + random.getrandbits(60)
    blocks = tuple(range(first, first + div_ceil(tokens, TRACE_BLOCK_TOKENS)))
    probe = Arrival(0.0, tokens, sum(each.output_tokens for each in arrivals) // count, blocks)
    (seen,) = (await replay(client, [probe], lambda text: None)).seen
    if seen.outcome != "finished":
        raise NoServer(f"{client.url}: the request that was to show its speed failed: {seen.said or seen.error}")
    return seen.ended_s
