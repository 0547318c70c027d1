"""Runs in the Python of `--router-python`: ai-dynamo-runtime's RadixTree over a trace, the choice of a worker included.

Standard input: {"workers": N, "pool_blocks": N, "requests": [[hash, ...], ...]}. Standard output: one JSON object with the
seconds of CPU that each choice and all index updates took, in every thread of the process. The choice is made as the
library's users make it: overlap less load, over all workers, in Python.
"""

import json
import sys
import time
from collections import OrderedDict, deque
from typing import Any

RUNNING = 64
"""Requests that count as a worker's load: the last that were given to it."""


def choose(tree: Any, hashes: list[int], loads: list[int]) -> tuple[int, int]:
    """Return (worker, overlap) of the best score."""
    scores = tree.find_matches(hashes).scores
    overlaps = {key if isinstance(key, int) else key[0]: value for key, value in scores.items()}
    blocks = len(hashes) or 1
    most = max(loads) or 1
    best, chosen = -1e9, 0
    for worker, load in enumerate(loads):
        score = 2 * overlaps.get(worker, 0) / blocks - load / most
        if score > best:
            best, chosen = score, worker
    return chosen, overlaps.get(chosen, 0)


def event(number: int, what: dict[str, Any]) -> bytes:
    """Return one cache event as the library takes it."""
    return json.dumps({"event_id": number, "data": what}).encode()


def main() -> None:
    """Replay the trace, and print the times."""
    from dynamo.llm import RadixTree  # type: ignore[import-not-found, unused-ignore]

    order = json.load(sys.stdin)
    workers = order["workers"]
    tree, loads = RadixTree(), [0] * workers
    pools: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
    running: deque[int] = deque()
    choices: list[float] = []
    updates_s, updated = 0.0, 0
    for number, hashes in enumerate(order["requests"]):
        begun = time.process_time()
        worker, _ = choose(tree, hashes, loads)
        choices.append(time.process_time() - begun)
        loads[worker] += 1
        running.append(worker)
        if len(running) > RUNNING * workers:
            loads[running.popleft()] -= 1
        pool = pools[worker]
        blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
        events = [event(number, {"stored": {"parent_hash": None, "blocks": blocks}})]
        for each in reversed(hashes):  # the last blocks of a prompt are removed first: no block remains without those before it
            pool[each] = None
            pool.move_to_end(each)
        gone = [pool.popitem(last=False)[0] for _ in range(len(pool) - order["pool_blocks"])]
        if gone:
            events.append(event(number, {"removed": {"block_hashes": gone}}))
        begun = time.process_time()
        for each in events:
            tree.apply_event(worker, each)
        tree.find_matches([])  # waits for the pending work of its thread
        updates_s += time.process_time() - begun
        updated += len(hashes) + len(gone)
    sys.stdout.write(json.dumps({"choices_s": choices, "updates_s": updates_s, "updated": updated}))


if __name__ == "__main__":
    main()
