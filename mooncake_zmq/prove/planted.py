"""Our connector with a bug planted, which a proof must find: vLLM loads this module in the connector's place."""

import os

from mooncake_zmq.prove.planted_names import PLANTED_VARIABLE, keys_without_prefix
from mooncake_zmq.vllm import connector, names

__all__ = ["MooncakeZmqConnector"]
MooncakeZmqConnector = connector.MooncakeZmqConnector

match os.environ.get(PLANTED_VARIABLE):
    case "names_ignore_engine":
        names.Engine.digest = property(lambda _engine: "0" * 32)  # type: ignore[assignment,method-assign]
    case "keys_forget_prefix":
        setattr(connector, "token_keys", keys_without_prefix)  # noqa: B010
