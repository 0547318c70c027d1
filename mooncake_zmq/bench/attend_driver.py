"""The other process of `bench attend`: it computes a context, lends its KV for each request of the batch, and attends to it.

Its argument is a JSON object: the model's place and the loans. It answers one line when ready; see `bench.others.peers`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mooncake_zmq.bench.attend import ALL, PART, cut, encoded_manual
from mooncake_zmq.bench.keys_driver import fail
from mooncake_zmq.bench.quality import prefilled
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.weights import load_engine
from mooncake_zmq.transfer.partials import PartialHost


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    limit_blas()
    engine = load_engine(order["path"], threads=order["threads"], backend=order["backend"])
    assert isinstance(engine, Llama)
    whole = prefilled(engine, encoded_manual(Path(order["path"]), order["tokens"])[: order["tokens"]])
    host = PartialHost(engine.spec, engine.attend_part, order["endpoint"], sealed=order["sealed"], on_crash=fail)
    ticket = host.ticket()
    loans: dict[str, list[int | None]] = {name: [] for name in (PART, ALL)}
    for name, numbers in loans.items():
        start, stop = order[name]
        if start < stop:
            each = (cut(engine, whole, start, stop, order["steps"]) for _ in range(order["batch"]))
            numbers += [host.lend(ticket.token, sequence, grows=name == ALL) for sequence in each]
    answer = {"where": host.where, "token": ticket.token.hex(), "secret": ticket.secret.hex(), **loans}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    host.close()


if __name__ == "__main__":
    main(sys.argv[1:])
