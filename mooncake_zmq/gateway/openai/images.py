"""Images in chats: the form in which clients send them, and their limits. PURE.

An image comes as a data URL. Nothing is fetched for a client from elsewhere: neither here nor by a vLLM.
"""

import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from mooncake_zmq.core.messages import MAX_CONSTRAINT_BYTES, MAX_MESSAGE_BYTES, MAX_RENDERED_BYTES
from mooncake_zmq.gateway.openai.errors import RequestError, invalid, quoted
from mooncake_zmq.gateway.served_model import ServedModel
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import KEY_BYTES

HEAD = re.compile(r"data:image/[A-Za-z0-9.+-]{1,64};base64,")
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
TOO_LARGE = "images_too_large"
OTHER_BYTES = 512 << 10
"""Bytes of a request's message beside its tokens, keys, constraint and images."""
COPIES = 3
"""Copies of a chat with images that the gateway holds until it is tokens."""
Part = dict[str, Any]


class ImageUrl(Struct, frozen=True, gc=False):
    """Where an image is. `detail` is not looked at: a model's processor cuts all images in one way."""

    url: str
    detail: str | None = None


def image_part(url: str) -> Part:
    """Return a part of a message that is an image. Raises RequestError unless it is a data URL."""
    head = HEAD.match(url)
    if head is None:
        text = (
            f"an image is a data URL (data:image/png;base64,...), as nothing is fetched from elsewhere: not {quoted(url[:64])}"
        )
        raise invalid("messages", text)
    if BASE64.fullmatch(url, head.end()) is None:
        raise invalid("messages", f"an image after {quoted(head[0])} is not base64")
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(content: str | Sequence[Part]) -> str:
    """Return the text of a turn's content, without its images."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def content_of(parts: list[Part]) -> str | list[Part]:
    """Return the content of a turn: one text, with the texts joined by line breaks as vLLM does, unless it has images."""
    return parts if any(part["type"] == "image_url" for part in parts) else text_of(parts)


def urls_in(turns: Sequence[Part]) -> list[str]:
    """Return the data URLs of all images of a conversation, in order."""
    contents = [turn["content"] for turn in turns if not isinstance(turn["content"], str)]
    return [part["image_url"]["url"] for parts in contents for part in parts if part["type"] == "image_url"]


def most_bytes(model: ServedModel, settings: EdgeSettings) -> int:
    """Return the bytes of all images of one call: the prompt and the answer, as long as they may be, fit into a message with
    them."""
    keys = (KEY_BYTES + 2) * (model.max_model_len // model.block_tokens)
    room = MAX_MESSAGE_BYTES - MAX_CONSTRAINT_BYTES - OTHER_BYTES - 4 * model.max_model_len - keys
    return max(0, min(settings.max_image_bytes, room))


def check_images(urls: Sequence[str], model: ServedModel, settings: EdgeSettings) -> None:
    """Refuse too many images, and such as are too large. Raises RequestError."""
    if len(urls) > settings.max_images:
        raise invalid("messages", f"{len(urls)} images are more than the {settings.max_images} that one call may have")
    if (size := sum(map(len, urls))) > (most := most_bytes(model, settings)):
        text = f"the images are {size} bytes of data URLs, more than the {most} that one call may have"
        raise RequestError(413, text, param="messages", code=TOO_LARGE)


def held_bytes(chat: bytes, urls: Sequence[str], choices: int, settings: EdgeSettings) -> int:
    """Return the bytes that the gateway holds for a chat with images, which go with each of the `choices`. Raises RequestError
    if the chat is too long to be written by a vLLM, or if these are more than one call may take up."""
    if len(chat) > MAX_RENDERED_BYTES:
        text = f"a chat with images is at most {MAX_RENDERED_BYTES} bytes of JSON, this one is {len(chat)}"
        raise RequestError(413, text, param="messages", code=TOO_LARGE)
    held = max(COPIES * len(chat), choices * sum(map(len, urls)))
    if held > (most := settings.max_held_image_bytes // 2):
        text = f"{choices} choices of a chat with images take up {held} bytes, more than the {most} that one call may"
        raise RequestError(413, text, param="messages", code=TOO_LARGE)
    return held
