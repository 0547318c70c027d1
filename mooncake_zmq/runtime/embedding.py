"""Embeds texts by vLLM's `/v1/embeddings`. It decides nothing; whatever is received is checked against a limit."""

import base64
from itertools import accumulate
from typing import Any, Final

import httpx
import msgspec
import numpy as np
from msgspec import Struct

from mooncake_zmq.core.messages import MAX_VECTORS_BYTES
from mooncake_zmq.core.work import Embed, Embedded, WorkFailed
from mooncake_zmq.kv.block_hash import salt_of, unpack_tokens
from mooncake_zmq.runtime.vllm_answers import JSON, Nonsense, for_model, reason_of, shown, whole

EMBEDDINGS: Final = "/v1/embeddings"
ONE_TEXT: Final = {"input": [[0]], "encoding_format": "base64"}
"""The shortest request."""
MORE_BYTES: Final = 64 << 10
"""Bytes of vLLM's answer around the vectors."""
REFUSED: Final = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)


class _Vector(Struct, frozen=True):
    index: int
    embedding: str


class _Answer(Struct, frozen=True):
    data: list[_Vector]


def embedding_body(work: Embed, model: str = "") -> bytes:
    """Return the body for `/v1/embeddings`. The root of the keys is the salt of vLLM's cache: tenants share none of it."""
    tokens, ends = unpack_tokens(work.tokens), [*accumulate(work.embedding.lengths)]
    texts = [tokens[end - length : end] for end, length in zip(ends, work.embedding.lengths, strict=True)]
    body: dict[str, Any] = {"input": texts, "encoding_format": "base64", "cache_salt": salt_of(work.root)}
    if work.embedding.dimensions:
        body["dimensions"] = work.embedding.dimensions
    return msgspec.json.encode(for_model(body, work.adapter or model))


def vectors_in(raw: bytes | bytearray, work: Embed) -> bytes:
    """Return the vectors of all texts, in order, from vLLM's answer. Raises Nonsense."""
    try:
        data = sorted(msgspec.json.decode(raw, type=_Answer).data, key=lambda each: each.index)
        vectors = [base64.b64decode(each.embedding, validate=True) for each in data]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Nonsense(f"vLLM sends no vectors: {shown(str(error))}") from None
    whole = b"".join(vectors)
    if [each.index for each in data] != [*range(len(work.embedding.lengths))] or len({*map(len, vectors)}) != 1:
        raise Nonsense("vLLM sends other vectors than one of equal length for each text")
    if len(whole) > MAX_VECTORS_BYTES or not work.embedding.has(whole):
        raise Nonsense(f"vLLM sends {len(whole)} bytes of vectors, which are not what was asked for")
    if not np.isfinite(np.frombuffer(whole, "<f4")).all():
        raise Nonsense("vLLM sends vectors with infinities or no numbers in them")
    return whole


async def embed(client: httpx.AsyncClient, work: Embed, connect_s: float, model: str = "") -> Embedded | WorkFailed:
    """Return the vectors, or why the model does not embed so. Raises Nonsense and httpx.HTTPError."""
    most = MAX_VECTORS_BYTES * 4 // 3 + MORE_BYTES
    timeout = httpx.Timeout(connect_s, read=work.quiet_s)
    async with client.stream(
        "POST", EMBEDDINGS, content=embedding_body(work, model), headers=JSON, timeout=timeout
    ) as response:
        raw = await whole(response, most, f"vLLM sends more than {most} bytes of vectors")
    if response.status_code in REFUSED:
        return WorkFailed(reason_of(raw), stuck=True)
    if response.status_code != httpx.codes.OK:
        raise Nonsense(f"vLLM answers {response.status_code}: {reason_of(raw)}")
    return Embedded(vectors_in(raw, work))
