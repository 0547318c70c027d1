"""POST /v1/embeddings, in OpenAI's shapes: its texts are made into requests, and their vectors into an answer. PURE.

Several short texts are one request, so that a vLLM gets them at once; a request is not longer than the model's context.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from mooncake_zmq.core.messages import MAX_TEXTS, MAX_VECTORS_BYTES, Embedding, Sampling, StopRule
from mooncake_zmq.gateway.openai.bodies import CompletionBody, Prompt, parsed
from mooncake_zmq.gateway.openai.errors import RequestError, asked, invalid, too_long
from mooncake_zmq.gateway.openai.prepare import check_size, salted, tokenized
from mooncake_zmq.gateway.requests.client_events import ClientOutput, ClientRequest, Failed, Finished, Vectors
from mooncake_zmq.gateway.requests.tenants import Tenant
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import pack_tokens

MOST_INPUTS = 2048
"""Texts of one call, as OpenAI has it."""


class EmbeddingBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text, token ids, or a list of either. `user` is not looked at."""

    input: Raw
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_VECTORS_BYTES // 4 // MAX_TEXTS)] | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


@dataclass(slots=True)
class Embeddings:
    """A valid body, tokenized, and the vectors that arrived: those of `requests[i]` are `found[i]`."""

    model: ServedModel
    requests: list[ClientRequest]
    as_base64: bool
    found: dict[int, bytes] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """Whether all requests have ended."""
        return len(self.ended) == len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(request.tokens) // 4 for request in self.requests)

    @property
    def embedded_tokens(self) -> int:
        """Tokens of the texts whose vectors arrived."""
        return sum(len(self.requests[index].tokens) // 4 for index in self.found)

    def accept(self, outputs: Sequence[tuple[int, ClientOutput]]) -> None:
        """Take the actor's next outputs. Raises RequestError at the first failure."""
        for index, output in outputs:
            match output:
                case Vectors(vectors):
                    self.found[index] = vectors
                case Finished():
                    self.ended.add(index)
                case Failed():
                    raise RequestError.of(output)

    def encoded(self) -> bytes:
        """Return the answer, once it is done. Each vector is written by itself: while msgspec writes, no other thread runs, and
        millions of numbers take it a second."""
        vectors = [msgspec.Raw(vector) for index in range(len(self.requests)) for vector in self._vectors(index)]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": self.model.id, "usage": usage})

    def _vectors(self, index: int) -> list[bytes]:
        embedding, whole = self.requests[index].embedding, self.found[index]
        assert embedding is not None
        rows = np.frombuffer(whole, "<f4").reshape(len(embedding.lengths), -1)
        return [msgspec.json.encode(row.tobytes() if self.as_base64 else row.tolist()) for row in rows]  # bytes as base64


def prepare_embeddings(
    raw: bytes | bytearray, models: ServedModels, settings: EdgeSettings, tenant: Tenant | None = None
) -> Embeddings:
    """Parse, check and tokenize, in a thread. Raises RequestError."""
    body = parsed(raw, EmbeddingBody)
    model = asked(body.model, models)
    if not model.embeds:
        raise invalid("model", f"the model {model.id!r} does not support the Embeddings API", "model_not_supported")
    prompts = _prompts(body, model)
    salt = salted(tenant, body.cache_salt)
    texts = [_text(prompt, model, salt) for prompt in prompts]
    root, _ = model.hash_prompt(b"", salt)
    requests = []
    for group in _groups(texts, model.max_model_len):
        request = ClientRequest(
            tokens=b"".join(map(pack_tokens, group)),
            root=root,
            model=model.identity,
            model_name=model.id,
            adapter=model.adapter,
            keys=(),
            sampling=Sampling(),
            stop=StopRule(max_tokens=1),
            tenant="" if tenant is None else tenant.name,
            embedding=Embedding(tuple(map(len, group)), body.dimensions or 0),
        )
        requests.append(request)
    if len(requests) > settings.max_choices:
        text = f"these texts are {len(requests)} times the model's context, more than {settings.max_choices}: divide them"
        raise invalid("input", text)
    return Embeddings(model, requests, as_base64=body.encoding_format == "base64")


def _prompts(body: EmbeddingBody, model: ServedModel) -> list[Prompt]:
    """Return the texts. Raises RequestError, which names `input`."""
    try:
        return CompletionBody(prompt=body.input).prompts(model, MOST_INPUTS)
    except RequestError as error:
        error.param = "input" if error.param == "prompt" else error.param
        raise


def _text(prompt: Prompt, model: ServedModel, salt: str) -> "array[int]":
    check_size(prompt, model, "input")
    ids = tokenized(prompt, model, "input", salt=salt)
    if len(ids) > model.max_model_len:
        raise too_long("input", model, f"you requested {len(ids)} tokens")
    return ids


def _groups(texts: Sequence["array[int]"], most_tokens: int) -> list[list["array[int]"]]:
    """Return the texts of each request, in order."""
    groups: list[list[array[int]]] = []
    tokens = 0
    for text in texts:
        if not groups or len(groups[-1]) == MAX_TEXTS or tokens + len(text) > most_tokens:
            groups.append([])
            tokens = 0
        groups[-1].append(text)
        tokens += len(text)
    return groups
