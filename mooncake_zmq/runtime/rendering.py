"""Writes chats with images as tokens by vLLM's `/v1/chat/completions/render`, and gives images to its `/inference/v1/generate`.
It decides nothing; whatever is received is checked against a limit.

vLLM itself puts as many placeholder tokens into a prompt as an image takes: what it is given has one token for each image, and
the images beside them.

    prompt      | a b # # # # c # # # # d |      two images of four tokens
    given       | a b # c # d |  image 1, image 2
"""

import asyncio
from typing import Final

import httpx
import msgspec
from msgspec import Struct

from mooncake_zmq.core.messages import MAX_IMAGES, MAX_TOKENS, Image
from mooncake_zmq.core.work import ChatWritten, WorkFailed, WriteChat
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.image_keys import digest_of
from mooncake_zmq.runtime.derender import RENDER
from mooncake_zmq.runtime.vllm_answers import JSON, Nonsense, for_model, reason_of, shown, whole
from mooncake_zmq.vllm.names import is_of_content

MOST_BYTES: Final = 16 * MAX_TOKENS + (1 << 20)
"""Bytes of the token ids of a prompt as JSON, and of what is around them."""
REFUSED: Final = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.NOT_IMPLEMENTED)
BOMB: Final = "decompression bomb"
"""Words of an error, which vLLM takes for its own, at an image of more pixels than its decoder takes."""
IMAGE: Final = "image"
PATCHWORK: Final = (
    "images of this model are not supported: they are tokens of several kinds, which vLLM's API for token ids cannot take back"
)


class _Place(Struct, frozen=True):
    offset: int
    length: int


class _Features(Struct, frozen=True):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Place]]


class _Rendered(Struct, frozen=True):
    token_ids: list[int]
    features: _Features | None = None


async def write_chat(client: httpx.AsyncClient, work: WriteChat, model: str = "") -> ChatWritten | WorkFailed:
    """Return a chat's tokens, or why vLLM does not take the chat. Raises Nonsense and httpx.HTTPError."""
    try:
        body = await asyncio.to_thread(_body, work, model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return WorkFailed(f"the chat is no JSON object: {shown(str(error))}", stuck=True)
    async with client.stream("POST", RENDER, content=body, headers=JSON, timeout=None) as response:
        raw = await whole(response, MOST_BYTES, f"vLLM writes a chat in more than {MOST_BYTES} bytes")
    if response.status_code in REFUSED or BOMB in reason_of(raw):
        return WorkFailed(reason_of(raw), stuck=True)
    if response.status_code in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND) and not (model and model in reason_of(raw)):
        return WorkFailed("the model's vLLM has no API that writes chats as tokens", stuck=True)
    if response.status_code != httpx.codes.OK:
        raise Nonsense(f"vLLM answers {response.status_code}: {reason_of(raw)}")
    return await asyncio.to_thread(what_was_written, raw)


def _body(work: WriteChat, model: str) -> bytes:
    """Return the chat's body, without the tensors of its images in the answer. No tool is called here: so a server without a
    parser of calls writes tools into the prompt too."""
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(work.chat, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | for_model({"mm_payload": "none", "tool_choice": "none"}, model))


def what_was_written(raw: bytes | bytearray) -> ChatWritten | WorkFailed:
    """Return a chat's tokens and where its images are, from vLLM's answer. Raises Nonsense."""
    try:
        rendered = msgspec.json.decode(raw, type=_Rendered)
        tokens = pack_tokens(rendered.token_ids)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Nonsense(f"vLLM writes no chat: {shown(str(error))}") from None
    if len(tokens) > 4 * MAX_TOKENS or min(rendered.token_ids, default=-1) < 0:
        raise Nonsense(f"vLLM writes a chat as {len(rendered.token_ids)} tokens, or as none at all")
    features = rendered.features or _Features({}, {})
    names, places = features.mm_hashes, features.mm_placeholders
    if {*names, *places} - {IMAGE} or len(names.get(IMAGE, ())) != len(places.get(IMAGE, ())):
        raise Nonsense("vLLM writes a chat with other things than its images")
    if len(names.get(IMAGE, ())) > MAX_IMAGES or not all(map(is_of_content, names.get(IMAGE, ()))):
        raise Nonsense("vLLM names images in another way than by their content")
    begin, images = 0, list[Image]()
    for name, place in zip(names.get(IMAGE, ()), places.get(IMAGE, ()), strict=True):
        own = rendered.token_ids[place.offset : place.offset + place.length] if place.offset >= begin else []
        if len(own) != place.length or not own:
            raise Nonsense("vLLM writes images into a chat that are not one after the other")
        if own.count(own[0]) != len(own):
            return WorkFailed(PATCHWORK, stuck=True)
        images.append(Image(begin=place.offset, length=place.length, digest=digest_of(name.rpartition(":")[2])))
        begin = place.offset + place.length
    return ChatWritten(tokens, tuple(images))


def without_repeats(tokens: bytes, images: tuple[Image, ...]) -> bytes:
    """Return the tokens (int32 bytes) with the first one of each image alone."""
    pieces, done = list[bytes](), 0
    for image in images:
        pieces.append(tokens[4 * done : 4 * (image.begin + 1)])
        done = image.begin + image.length
    return b"".join(pieces) + tokens[4 * done :]


def parts_of(images: tuple[Image, ...]) -> list[dict[str, str]]:
    """Return the images in the form in which vLLM takes them beside token ids."""
    return [{"type": "image_url", "url": image.url.decode("ascii", "replace")} for image in images]
