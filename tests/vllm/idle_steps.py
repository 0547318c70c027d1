"""Run by path in a Python that has vLLM: when the scheduler's half waits for an answer, and that nothing else makes it wait.

argv: where a store would be; nobody is there.
"""

import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace as Told
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mooncake_zmq.store.client.client import Hold
from mooncake_zmq.vllm import connector
from mooncake_zmq.vllm.lookups import Lookup
from mooncake_zmq.vllm.settings import read_settings

BLOCK_TOKENS = 8


def half(address: str) -> connector._SchedulerHalf:
    transfer = Told(kv_load_failure_policy="recompute", is_kv_consumer=True, is_kv_producer=True)
    scheduler = Told(max_num_scheduled_tokens=64, max_num_batched_tokens=64)
    full = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = Told(kv_cache_groups=[Told(kv_cache_spec=full)], num_blocks=8)
    made = connector._SchedulerHalf(
        Told(kv_transfer_config=transfer, scheduler_config=scheduler, lora_config=None),
        cache,
        read_settings({"stores": address}),
    )
    made.meet(["vllm/digest/0.0/"])
    return made


def request() -> Told:
    plain: dict[str, Any] = {
        "resumable": False,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return Told(request_id="r", num_tokens=33, all_token_ids=list(range(33)), kv_transfer_params=None, **plain)


def main(address: str) -> None:
    scheduling, asked = half(address), request()
    lookups: Any = scheduling._lookups
    answers: list[Lookup] = []
    waits: list[float] = []

    def ask(names: list[str], first: Sequence[str] = ()) -> Lookup:
        answers.append(Lookup(names, first, lambda lookup: None))
        return answers[-1]

    lookups.ask, lookups.wait = ask, waits.append

    def plan(tokens: int = 0) -> int:
        """How often the step waits."""
        waits.clear()
        state = Told(get_block_ids=lambda request_id: ([],), boundary_state_offloads={})
        output = Told(kv_connector_block_state=state, num_scheduled_tokens={}, total_num_scheduled_tokens=tokens)
        scheduling.plan(output)
        return len(waits)

    assert plan() == 0
    scheduling.add(asked)
    assert scheduling.matched(asked, 0) is None
    assert plan() == 1
    assert plan() == 0, "nobody has asked since"
    assert scheduling.matched(asked, 0) is None
    assert plan(tokens=5) == 0, "something is computed meanwhile"
    answers[-1].end(Hold(0, time.monotonic() + 60))
    assert scheduling.matched(asked, 0) == 0
    assert plan() == 0
    scheduling.close()


if __name__ == "__main__":
    main(sys.argv[1])
