"""Messages by which a vLLM writes a chat with images as tokens: the chat goes from gateway to vLLM node, the tokens come back.

How many tokens an image takes, and which, only the model's own processor knows.
"""

from typing import Annotated, Final

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_TOKENS,
    Count,
    Key,
    Record,
    RequestId,
    Seconds,
    TaggedRecord,
    Tenant,
    Text,
    Tokens,
)

MAX_IMAGES: Final = 64
"""Images that one request may have."""
MAX_IMAGES_BYTES: Final = 4 << 20
"""Bytes of all images of one request, as the data URLs in which they came."""
MAX_RENDERED_BYTES: Final = 6 << 20
"""Bytes of JSON of a chat with its images."""


class Image(Record, frozen=True):
    """An image in a prompt: `length` tokens from token `begin` on, all alike, stand for it. `digest`: of its content, which is
    in the keys of the prompt's blocks. `url`: the image as a data URL, where it is needed."""

    begin: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    digest: Key
    url: Annotated[bytes, Meta(max_length=MAX_IMAGES_BYTES)] = b""


Images = Annotated[tuple[Image, ...], Meta(max_length=MAX_IMAGES)]


class RenderChat(TaggedRecord, frozen=True):
    """Request to write a chat as tokens. `chat`: JSON of the fields of the client's request that decide them, with its images.
    `call`: the number of this call for the request, which its answer repeats."""

    request_id: RequestId
    call: Count
    deadline_s: Seconds
    """Time after which the gateway asks another vLLM."""
    chat: Annotated[bytes, Meta(max_length=MAX_RENDERED_BYTES)]
    tenant: Tenant = ""
    """The tenant that asks, by which the node is shared."""


class ChatRendered(TaggedRecord, frozen=True):
    """The tokens of a chat, and where its images are in them, in order."""

    request_id: RequestId
    call: Count
    tokens: Tokens
    images: Images


class ChatUnrendered(TaggedRecord, frozen=True):
    """Reply of a node whose vLLM did not write a chat. `refused`: no vLLM of this model would, so that the client has to know
    the reason."""

    request_id: RequestId
    call: Count
    reason: Text
    refused: bool = False
