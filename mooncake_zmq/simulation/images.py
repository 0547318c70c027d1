"""Images in simulated prompts: which prompts have one, and what a simulated vLLM makes of it."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Image
from mooncake_zmq.core.work import ChatWritten
from mooncake_zmq.gateway.requests.client_events import ChatToRender, ClientRequest
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.image_keys import Begin, digest_of

SHOW = (b"data:image/png;base64,Y2F0", b"data:image/png;base64,ZG9n")


def image_in(prompt: Sequence[int]) -> tuple[Image, ...]:
    """Return the image of a prompt, of two in seven; it draws nothing. One token stands for it, which any other prompt may have
    in that place."""
    tokens = len(prompt)
    if tokens % 7 not in (1, 5):
        return ()
    return (_image(tokens // 3, SHOW[tokens % 7 // 5]),)


def _image(begin: int, url: bytes) -> Image:
    return Image(begin=begin, length=1, digest=digest_of(url.decode()), url=url)


def begins_of(images: Sequence[Image]) -> list[Begin]:
    """Return where images begin, as keys are made."""
    return [(image.begin, image.digest) for image in images]


def shown(tokens: NDArray[np.uint32], images: Sequence[Image]) -> NDArray[np.uint32]:
    """Return what a vLLM computes: the tokens, with what each image shows in its place."""
    seen = tokens.copy()
    for image in images:
        seen[image.begin] = int.from_bytes(digest_of(image.url.decode())[:3], "little")
    return seen


def chat_of(request: ClientRequest) -> ChatToRender:
    """Return the chat that a vLLM writes as the tokens of a request."""
    urls = [(image.begin, image.url.decode()) for image in request.images]
    chat = msgspec.json.encode((request.tokens, urls))
    return ChatToRender(chat=chat, images=len(urls), model=request.model)


def written(chat: bytes) -> ChatWritten:
    """Return what a vLLM makes of a chat."""
    tokens, urls = msgspec.json.decode(chat, type=tuple[bytes, list[tuple[int, str]]])
    images = [Image(begin=begin, length=1, digest=digest_of(url)) for begin, url in urls]
    return ChatWritten(tokens, tuple(images))


def text_of(seen: NDArray[np.uint32]) -> bytes:
    """Return what a vLLM computes as bytes, for the comparison of two prompts."""
    return pack_tokens(seen.tolist())
