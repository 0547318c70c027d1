"""Bugs planted in prompts with images and in texts that are embedded, see `planted`. Simulation only."""

from typing import Any

from msgspec import structs

from mooncake_zmq.core.work import Embed, Generate
from mooncake_zmq.kv.block_hash import Key, extend_keys
from mooncake_zmq.simulation import traces, vllm_works
from mooncake_zmq.simulation.planted_stores import Replacements
from mooncake_zmq.vllm_node.job import Job


def key_without_image() -> Replacements:
    """The keys of a prompt's blocks do not cover its images."""

    def careless(parent: bytes, tokens: bytes, block_tokens: int, _begins: Any) -> list[Key]:
        return extend_keys(parent, tokens, block_tokens)

    return [(vllm_works, "keys_with_images", careless), (traces, "keys_with_images", careless)]


def vectors_of_another() -> Replacements:
    """Texts are embedded under a root that is not that of their tenant."""
    work = Job.work

    def careless(self: Job, *arguments: Any) -> Generate | Embed:
        found = work(self, *arguments)
        return structs.replace(found, root=bytes(16)) if isinstance(found, Embed) else found

    return [(Job, "work", careless)]
