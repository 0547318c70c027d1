"""The TTFT of a prompt whose blocks another host has, over a link of 100 MB/s: with coded KV beside exact KV.

Two clusters are up, which fetch all blocks before they compute what follows them; a prompt is answered by both in turn.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from mooncake_zmq.bench.report import Progress, Row
from mooncake_zmq.bench.slow_link import TAIL_TOKENS, WAITS, random_prompt, slow_link
from mooncake_zmq.config.examples import LOCAL, located
from mooncake_zmq.config.load import load
from mooncake_zmq.kv.codec import EXACT
from mooncake_zmq.runtime.model import prepared

LINK_BYTES_PER_S = 100e6
CODEC = "int4"
ROOM_BYTES = 64 << 20
"""Room in a pool beside the exact KV of all prompts."""


def link_row(model: str, cache_dir: str, tokens: int, rounds: int, progress: Progress) -> Row:
    """Return the medians of `rounds` prompts, after one that is not counted. Raises click.ClickException when a cluster cannot
    be started or does not fetch."""
    path, random = Path(located(LOCAL)), np.random.default_rng(time.time_ns())
    own = {"model.path": model, "model.cache_dir": cache_dir}
    settings = load(path, own).config
    cached = max(1, tokens // settings.model.block_tokens) * settings.model.block_tokens
    pool_bytes = ROOM_BYTES + (rounds + 1) * cached * prepared(settings).kv_bytes_per_token
    own |= WAITS | {"cache_node.pool_bytes": str(pool_bytes)}
    prompts = [random_prompt(random, cached) for _ in range(rounds + 1)]
    took: dict[str, list[float]] = {EXACT: [], CODEC: []}
    with ExitStack() as stack:
        links = {
            name: stack.enter_context(slow_link(path, settings, own | {"model.kv_codec": name}, fetches_all=True))
            for name in took
        }
        for name, link in links.items():
            progress(f"computing {len(prompts)} prompts on the first host, {name}")
            with link.only(first=True):
                for prompt in prompts:
                    link.ask(prompt)
                link.cluster.settle()
            link.set_rate(LINK_BYTES_PER_S)
            stack.enter_context(link.only(first=False))
        for number, prompt in enumerate(prompts):
            progress(f"link, round {number} of {rounds}")
            for name, link in links.items():
                took[name].append(link.fetch(prompt).ttft_s)
    value, reference = (1e3 * median(took[name][1:]) for name in (CODEC, EXACT))
    what = f"TTFT of {cached:,} tokens over 100 MB/s and {TAIL_TOKENS} more, {CODEC} / exact"
    return Row(what, "ms", value, reference)
