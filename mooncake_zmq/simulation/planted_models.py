"""Bugs planted where several models and adapters share stores, see `planted`. Simulation only."""

from typing import Any

from msgspec import structs

from mooncake_zmq.core.messages import StartPrefill
from mooncake_zmq.gateway.requests import readiness, relocations
from mooncake_zmq.gateway.requests.request import Request
from mooncake_zmq.kv.block_hash import namespace
from mooncake_zmq.simulation import traces
from mooncake_zmq.simulation.planted_stores import Replacements


def key_without_adapter() -> Replacements:
    """The keys of a prompt's blocks do not cover the adapter."""

    def careless(*, model: str, layout: str, salt: str, adapter: str) -> bytes:
        return namespace(model=model, layout=layout, salt=salt)

    return [(traces, "namespace", careless)]


def key_without_model() -> Replacements:
    """The keys of a prompt's blocks do not cover the model."""

    def careless(*, model: str, layout: str, salt: str, adapter: str) -> bytes:
        return namespace(model="", layout=layout, salt=salt, adapter=adapter)

    return [(traces, "namespace", careless)]


def any_model() -> Replacements:
    """A gateway takes every conductor and engine to be for the model of a request."""

    def careless(_peer: Any, _model: str) -> bool:
        return True

    return [(readiness, "is_for", careless), (relocations, "is_for", careless)]


def resume_bare(**fields: Any) -> Replacements:
    """An answer that another vLLM continues is asked for with some `fields` empty."""
    start = Request.start

    def forgetful(self: Request, *arguments: Any) -> StartPrefill:
        message = start(self, *arguments)
        return structs.replace(message, **fields) if message.first_index else message

    return [(Request, "start", forgetful)]
