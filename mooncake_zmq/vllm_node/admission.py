"""Admission of requests to a node beside vLLM. PURE."""

from collections.abc import Mapping
from typing import Final

from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import Hello, Part, Sampling, StartPrefill, has_field
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.vllm_node.settings import VllmSettings

IMAGES: Final = "StartPrefill.images"
WHOLE: Final = (True, True)
TAKES: Mapping[Part, tuple[bool, bool]] = {"both": WHOLE, "prefill": (True, False), "decode": (False, True)}
"""By part of the node: whether a request may begin there, and whether it may end there."""


def unable(sampling: Sampling, made: int) -> str | None:
    """Return why vLLM cannot do this once so many tokens are made; None if it can."""
    if made and sampling.constraint:
        return "vLLM would begin the grammar anew where an answer goes on"
    if made and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
        return "vLLM takes an answer that goes on for a part of the prompt, and does not penalize it"
    return None


class Admission:
    """Decide which requests one node accepts."""

    def __init__(
        self, name: str, settings: VllmSettings, layout: BlockLayout, peers: Mapping[str, Hello], counts: Tally
    ) -> None:
        self._name = name
        self._settings = settings
        self._layout = layout
        self._peers = peers
        self._counts = counts

    def asker(self, sender: str, message: StartPrefill) -> str | None:
        """Return the gateway of the request; None if it is down, or the sender has no right to name it."""
        gateway = message.gateway or sender
        roles = [hello.role for hello in (self._peers.get(sender), self._peers.get(gateway)) if hello is not None]
        right = roles == ["vllm" if message.gateway else "gateway", "gateway"]
        self._counts.add("unasked_requests", int(not right))
        return gateway if right else None

    def is_early(self, sender: str, message: StartPrefill) -> bool:
        """Return whether another vLLM passed on a request whose gateway is not connected yet."""
        hello = self._peers.get(sender)
        return bool(message.gateway) and message.gateway not in self._peers and hello is not None and hello.role == "vllm"

    def refusal(self, message: StartPrefill) -> str | None:
        """Return why this node can never take the request, or None. Such an attempt is repeated a few times at most."""
        length = len(message.tokens) // 4
        if length == 0 or not self._layout.has_tokens(message.tokens):
            return "no tokens, or such as the model does not have"
        kind = (not message.gateway, message.decode == self._name)
        if kind not in (WHOLE, TAKES[self._settings.part]) or message.stages:
            return f"that is no work for a vLLM of part {self._settings.part}"
        if message.embedding is not None and sum(message.embedding.lengths) != length:
            return "the texts are not those of its tokens"
        if not _has_images(message):
            return "the images are not those of its tokens"
        if message.stop.max_tokens <= message.first_index:
            return "no token is wanted"
        goes_on = message.decode != self._name and message.stop.max_tokens > message.first_index + 1
        if (reason := unable(message.sampling, message.first_index + goes_on)) is not None:
            return reason
        return None if length < self._settings.capacity_tokens else "prompt is longer than vLLM's KV"

    def may_pass_on(self, request: StartPrefill) -> bool:
        """Return whether a request ends here, or the vLLM that continues it is up and takes its images."""
        decode = self._peers.get(request.decode)
        if request.decode == self._name:
            return True
        return decode is not None and decode.role == "vllm" and (not request.images or has_field(decode.protocol, IMAGES))


def _has_images(message: StartPrefill) -> bool:
    """Return whether the images of a request are in its tokens one after the other, each as many equal tokens."""
    tokens, done = message.tokens, 0
    for image in message.images:
        own = tokens[4 * image.begin : 4 * (image.begin + image.length)]
        if (
            image.begin < done
            or len(own) != 4 * image.length
            or own != own[:4] * image.length
            or not image.url.startswith(b"data:image/")
        ):
            return False
        done = image.begin + image.length
    return not (message.images and message.embedding)
