"""The table of all decoders of bytes from outside, whose sender or author may be hostile.

Files are read where nothing is written to a disk. Every decoder here must be deterministic: an input alone decides.
"""

import ctypes
import gzip
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np

from mooncake_zmq.core import commands, keys, messages, profile
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Embedding, Hello, Image
from mooncake_zmq.core.records import NotAMessage
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.core.work import DiskBlock, Embed
from mooncake_zmq.engine import card
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.sources.safetensors_file import SafetensorsFile
from mooncake_zmq.engine.tokenizer import byte_tokenizer
from mooncake_zmq.engine.toy import TOY_SPEC
from mooncake_zmq.fuzz import model_files
from mooncake_zmq.fuzz.examination import IN_MEMORY, Decoder
from mooncake_zmq.fuzz.samples import samples
from mooncake_zmq.gateway.anthropic import messages as anthropic_messages
from mooncake_zmq.gateway.openai.bodies import ChatBody, CompletionBody
from mooncake_zmq.gateway.openai.embeddings import prepare_embeddings
from mooncake_zmq.gateway.openai.errors import RequestError
from mooncake_zmq.gateway.openai.prepare import prepare
from mooncake_zmq.gateway.requests import tenants
from mooncake_zmq.gateway.requests.client_events import Rendered
from mooncake_zmq.gateway.responses_api import items
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import pack_tokens, root_of_salt, salt_of
from mooncake_zmq.kv.engine_events import EventError, decode_batch
from mooncake_zmq.kv.layout import PAGE_BYTES, BlockLayout
from mooncake_zmq.kv.object_record import ObjectRecord, header, why_missed
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.traces import read_trace
from mooncake_zmq.pool.ssd import disk
from mooncake_zmq.pool.ssd.disk_index import DiskIndex, IndexFault, IndexUnusable
from mooncake_zmq.pool.ssd.object_index import ObjectIndex
from mooncake_zmq.runtime.derender import what_was_read
from mooncake_zmq.runtime.embedding import vectors_in
from mooncake_zmq.runtime.generation import Answer, EventLines, prompt_scores
from mooncake_zmq.runtime.rendering import what_was_written
from mooncake_zmq.runtime.vllm_answers import Nonsense, models_in
from mooncake_zmq.store import protocol, stream_messages, tensors
from mooncake_zmq.transfer import block_messages, partials, segment_file, shared_memory
from mooncake_zmq.transfer.sealing import Broken, Opener, Sealer
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.tickets import Attaching, Challenge, Refused, Tickets
from mooncake_zmq.vllm_node.mirror import Mirror

KEY = bytes(range(16))
LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=32)


@cache
def _directory() -> Path:
    """Return a directory of this process, removed at its end: where TMPDIR says, or else in memory."""
    where = tempfile.TemporaryDirectory(prefix="mz-fuzz-", dir=None if "TMPDIR" in os.environ else IN_MEMORY)
    _kept.append(where)
    return Path(where.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _by_file(read: Callable[[Path], object], suffix: str = "") -> Callable[[bytes], object]:
    """Return a function that calls `read` with a file that holds the input."""

    def by_file(raw: bytes) -> object:
        path = _directory() / f"input{suffix}"
        path.write_bytes(raw)
        return read(path)

    return by_file


def _drawn(kind: Any) -> Callable[[], list[bytes]]:
    return lambda: samples(kind, Random(1))


# --- between nodes


def _session(me: str, role: str, peer: str, peer_role: str) -> Session:
    hello = Hello(protocol=PROTOCOL_VERSION, role=role, host="host-a", model="m", tokenizer="t", layout="l", segment=None)
    peers = {peer: Member((peer_role,), "host-a")}
    session = Session(me=me, incarnation=1 << 40, hello=hello, peers=peers, settings=SessionSettings(), now=0.0)
    session.start(0.0)
    return session


def _frames(session: Session) -> list[bytes]:
    session.flush(0.0)
    frames = [frame for _, frame in session.outgoing]
    session.outgoing.clear()
    return frames


@cache
def _conversation() -> tuple[list[bytes], list[bytes]]:
    """Return the frames that a gateway sends to a decode: until their session is up, and after."""
    gateway, decode = _session("gateway-a", "gateway", "decode-a", "decode"), _decode()
    greeting: list[bytes] = []
    for _ in range(4):
        said = _frames(gateway)
        greeting += said
        for frame in said:
            decode.receive(0.0, frame)
        for frame in _frames(decode):
            gateway.receive(0.0, frame)
    assert decode.up_peers, "they do not hear each other"
    gateway.send(0.0, "decode-a", messages.CancelRequest(request_id="r", attempt=1))
    return greeting, _frames(gateway)


def _decode() -> Session:
    return _session("decode-a", "decode", "gateway-a", "gateway")


def _receive(raw: bytes) -> None:
    """Receive a frame as the first one of a session, and as a later one."""
    _decode().receive(0.0, raw)
    session = _decode()
    for frame in _conversation()[0]:
        session.receive(0.0, frame)
    session.receive(0.1, raw)
    session.receive(0.2, raw)
    session.tick(0.3)
    session.flush(0.3)


@cache
def _tickets() -> Tickets:
    tickets = Tickets(sealed=True)
    tickets._master = KEY * 2  # so that a finding of one process is one in another
    return tickets


def _open_records(raw: bytes) -> bytes:
    """Read the records of a sealed stream to its end, a few bytes at a time."""
    opener, came, place = Opener(KEY * 2), memoryview(raw), memoryview(bytearray(512))
    taken = bytearray()
    while True:
        if count := opener.take(place):
            taken += place[:count]
            continue
        wanted = opener.wanted()
        part, came = came[: len(wanted)], came[len(wanted) :]
        if not part:
            return bytes(taken)
        wanted[: len(part)] = part
        opener.came(len(part))


def _sealed_seeds() -> list[bytes]:
    views = [memoryview(bytes(size)) for size in (1, 700)]
    return [b"".join(bytes(record) for view in views for record in sealer.records([view])) for sealer in (Sealer(KEY * 2),)]


# --- HTTP


@cache
def _served() -> ServedModels:
    model = ServedModel(
        id="toy",
        max_model_len=2048,
        vocab_size=512,
        block_tokens=32,
        model_fingerprint="weights",
        layout_fingerprint="layout",
        tokenizer=byte_tokenizer(),
        takes_images=True,
    )
    return ServedModels(model)


@cache
def _embedding() -> ServedModels:
    return ServedModels(replace(_served().each[0], embeds=True))


def _prepare(kind: Any, raw: bytes) -> object:
    prepared = prepare(raw, kind, _served(), EdgeSettings(), lambda: 1)
    if (chat := prepared.unrendered) is None:
        return prepared
    images = [Image(begin=at, length=1, digest=KEY) for at in range(chat.chat.images)]
    return chat.prepared(Rendered(pack_tokens([1] * (len(images) + 1)), tuple(images)))


def _bodies(**asked: object) -> list[bytes]:
    common = {"model": "toy", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["x"], "stream": True, "n": 2}
    more = {"stream_options": {"include_usage": True}, "top_p": 0.9, "top_k": 3, "cache_salt": "s", "ignore_eos": True}
    penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.1, "logit_bias": {"7": -3}}
    bodies = [
        asked,
        asked | common,
        asked | common | more,
        asked | penalties,
        asked | {"user": "u", "priority": 2, "tools": []},
        asked | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        asked | {"guided_choice": ["a", "b"]},
        asked | {"structured_outputs": {"grammar": 'root ::= "a"'}},
    ]
    return [json.dumps(body).encode() for body in bodies]


# --- files

BLOCK = DiskBlock(3, KEY, 12345, None, b"\1\0\0\0")
RECORD = ObjectRecord(7, 1, 4096, 100, 99, 0)
_FINGERPRINT = bytes(16)


def _read_index(opened: Callable[[Path], DiskIndex | ObjectIndex], path: Path) -> None:
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with closing(opened(path)) as index:
        list(index.load(lambda done, total: None))


_read_disk_index = partial(_read_index, partial(DiskIndex.open, fingerprint="fingerprint", segment_slots=64))
_read_store_index = partial(_read_index, ObjectIndex.open)


def _index_seeds() -> list[bytes]:
    path = _directory() / "seed.sqlite"
    index = DiskIndex.open(path, "fingerprint", 64)
    index.put([(BLOCK, 1), (DiskBlock(4, KEY[::-1], 1 << 63, KEY, b"", "a-tenant"), 2)])
    index.close()
    return [path.read_bytes()]


def _store_index_seeds() -> list[bytes]:
    path = _directory() / "seed-store.sqlite"
    index = ObjectIndex.open(path)
    index.put([("a key", RECORD)])
    index.close()
    return [path.read_bytes()]


def _slot_header(raw: bytes) -> str:
    return disk._header_miss(memoryview(raw.ljust(4096, b"\0")), _FINGERPRINT, BLOCK)


def _record_header(raw: bytes) -> str:
    expected = header(b"a key", RECORD)
    return why_missed(raw[: len(expected)].ljust(len(expected), b"\0"), expected)


def _segment_head(raw: bytes) -> tuple[bytes, int]:
    path = Path("segment")
    total_of = partial(shared_memory.total_bytes, path, LAYOUT, shared_memory.HOST)
    whole = raw.ljust(PAGE_BYTES, b"\0")
    return segment_file.check_head(path, whole, len(_segment()), shared_memory.KIND, 1, total_of)


@cache
def _segment() -> bytes:
    segment = shared_memory.Segment.create(_directory(), "fuzz", "seed", LAYOUT, 4, 1)
    try:
        return segment.path.read_bytes()
    finally:
        segment.close()


def _segment_seeds() -> list[bytes]:
    return [_segment()[:PAGE_BYTES].rstrip(b"\0")]


def _safetensors_seeds() -> list[bytes]:
    tensors = {"__metadata__": {}, "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    header = json.dumps(tensors).encode()
    return [struct.pack("<Q", len(header)) + header + bytes(16)]


def _card_seeds() -> list[bytes]:
    return [card.encode(card.ModelCard(spec=TOY_SPEC, tokenizer="bytes"))]


def _profile_seeds() -> list[bytes]:
    times = (profile.PrefillTime(tokens=512, prefix=0, seconds=0.1),) * 3
    steps = (profile.StepTime(batch=1, context=512, seconds=0.01),) * 3
    fields = {"model": "toy", "fingerprint": "f", "threads": 1, "backend": "numpy", "machine": "m"}
    return [profile.encode(profile.Profile(prefill=times, decode=steps, **fields))]  # type: ignore[arg-type]


_JSON_LINES = b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' * 2
_AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0,396,109\n"
_BURST = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
_API_KEYS = f"# who\nalice:{tenants.digest_of('x')}:requests=60,tokens=1000,share=0.5,role=admin\n".encode()
_PUBLIC_KEYS = f"# keys\ndecode-a node 2026-01-01 {'a' * 40}\nvllm store,events 2026-01-01 {'b' * 40}\n".encode()


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """Return a parser of files that are ASCII, or are not parsed at all."""
    return lambda raw: parse(raw.decode("ascii")) if raw.isascii() else None


# --- the table


def _between_nodes() -> Iterable[Decoder]:
    yield Decoder(
        name="envelope",
        read=messages.decode_envelope,
        refusals=(messages.ProtocolError,),
        seeds=lambda: [*_drawn(messages.Envelope)(), *_conversation()[0]],
    )
    yield Decoder(
        name="message", read=messages.decode, refusals=(messages.ProtocolError,), seeds=_drawn(messages.Message), max_bytes=8192
    )
    yield Decoder(name="session", read=_receive, seeds=lambda: [*_conversation()[0], *_conversation()[1]], quick=False)
    no_message = (NotAMessage,)
    kinds: dict[str, tuple[Callable[[Any], object], Any]] = {
        "stream-wanted": (block_messages.decode_wanted, block_messages.StreamWanted),
        "stream-offer": (block_messages.decode_offer, block_messages.StreamOffered | block_messages.StreamDenied),
        "block-request": (block_messages.decode_request, block_messages.ReadRequest),
        "block-reply": (block_messages.decode_reply, block_messages.ReadReply),
        "part-asked": (partials.decode_ask, partials.AskPart),
        "part-given": (partials.decode_given, partials.PartGiven),
    }
    for name, (read, kind) in kinds.items():
        yield Decoder(name=name, read=read, refusals=no_message, seeds=_drawn(kind))
    yield Decoder(
        name="opening",
        read=partial(Challenge, _tickets()),
        refusals=(Refused,),
        seeds=lambda: [Attaching(_tickets().make()).opening],
    )
    yield Decoder(name="sealed-records", read=_open_records, refusals=(Broken,), seeds=_sealed_seeds)


def _of_stores() -> Iterable[Decoder]:
    refused = (protocol.NotAMessage,)
    kinds: dict[str, tuple[Callable[[Any], object], Any]] = {
        "store-request": (protocol.decode_request, protocol.Request),
        "store-reply": (protocol.decode_reply, protocol.Reply),
        "stream-attach": (stream_messages.decode_attach, stream_messages.Attach),
        "stream-attached": (stream_messages.decode_attached, stream_messages.Attached | protocol.Stranger),
        "stream-request": (stream_messages.decode_request, stream_messages.Request | protocol.OfMemory),
        "stream-values": (stream_messages.decode_values, stream_messages.Values),
        "stream-checksums": (stream_messages.decode_checksums, stream_messages.Checksums),
        "stream-ended": (stream_messages.decode_ended, stream_messages.Ended),
    }
    for name, (read, kind) in kinds.items():
        yield Decoder(name=name, read=read, refusals=refused, seeds=_drawn(kind))
    yield Decoder(
        name="store-tensor",
        read=lambda raw: tensors.decode(bytearray(raw)),
        refusals=(tensors.NotATensor,),
        seeds=lambda: [_tensor(np.zeros(shape, dtype)) for shape, dtype in (((2, 3), "f4"), ((0, 3), "i1"), ((), "?"))],
    )


def _tensor(array: Any) -> bytes:
    encoded = tensors.Encoded(array)
    return b"".join(ctypes.string_at(address, size) for address, size in encoded.spans)


def _of_people() -> Iterable[Decoder]:
    refused = (RequestError,)
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": [{"type": "text", "text": "t"}]}]}
    yield Decoder(
        name="completions",
        read=partial(_prepare, CompletionBody),
        refusals=refused,
        seeds=lambda: [*_bodies(prompt="hello"), *_bodies(prompt=[1, 2, 3]), *_bodies(prompt=[[1], [2]])],
        max_bytes=16_384,
    )
    yield Decoder(
        name="chat",
        read=partial(_prepare, ChatBody),
        refusals=refused,
        seeds=lambda: [*_bodies(**chat), *_bodies(messages=[{"role": "user", "content": [_IMAGE, _IMAGE]}])],
        max_bytes=16_384,
    )
    yield Decoder(
        name="messages",
        read=lambda raw: _prepare(anthropic_messages.MessagesChat, anthropic_messages.as_chat(raw, _served())),
        refusals=refused,
        seeds=lambda: [json.dumps(_MESSAGES | more).encode() for more in ({}, _MESSAGES_OPTIONS)],
        max_bytes=16_384,
    )
    yield Decoder(
        name="responses",
        read=lambda raw: _prepare(ChatBody, items.as_chat(raw, _served())[0]),
        refusals=refused,
        seeds=lambda: [json.dumps({"model": "toy"} | more).encode() for more in ({"input": "hi"}, _RESPONSES_OPTIONS)],
        max_bytes=16_384,
    )
    yield Decoder(
        name="embeddings",
        read=lambda raw: prepare_embeddings(raw, _embedding(), EdgeSettings()),
        refusals=refused,
        seeds=lambda: [json.dumps(body).encode() for body in _EMBEDDINGS],
        max_bytes=16_384,
    )
    yield Decoder(name="ask", read=commands.decode, refusals=(commands.AskError,), seeds=_ask_seeds)
    yield Decoder(name="api-keys", read=_text(tenants.parse), refusals=(tenants.TenantsError,), seeds=lambda: [_API_KEYS])
    yield Decoder(name="public-keys", read=_text(keys.parse), refusals=(keys.KeysError,), seeds=lambda: [_PUBLIC_KEYS])


_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
_EMBEDDINGS = (
    {"input": "hello"},
    {"input": ["a", "b"], "model": "toy", "encoding_format": "base64", "dimensions": 8},
    {"input": [1, 2, 3], "user": "u", "cache_salt": "s"},
    {"input": [[1], [2, 3]], "encoding_format": "float"},
)
_MESSAGES = {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
_MESSAGES_OPTIONS = {
    "system": [{"type": "text", "text": "t"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "image", "source": _SOURCE}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}]},
        {"role": "assistant", "content": "so"},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "stream": True,
}


_RESPONSES_OPTIONS = {
    "instructions": "i",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "r"},
    ],
    "max_output_tokens": 3,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "stream": True,
}


def _ask_seeds() -> list[bytes]:
    return [
        commands.encode(commands.SetCopies(key="0f" * 16, copies=2)),
        commands.encode(commands.SetRole(node="decode-a", role="prefill")),
    ]


def _of_files() -> Iterable[Decoder]:
    unusable = (IndexUnusable, IndexFault, OSError)
    study = (StudyError,)
    model = (ModelError,)
    yield Decoder(name="slot-header", read=_slot_header, seeds=lambda: [disk._header(_FINGERPRINT, BLOCK, 1)])
    yield Decoder(name="record-header", read=_record_header, seeds=lambda: [header(b"a key", RECORD)])
    yield Decoder(name="segment-head", read=_segment_head, refusals=(SharedMemoryError,), seeds=_segment_seeds)
    yield _file("disk-index", _read_disk_index, unusable, _index_seeds, max_bytes=32_768)
    yield _file("store-index", _read_store_index, unusable, _store_index_seeds, max_bytes=32_768)
    yield _file("trace-lines", read_trace, study, lambda: [_JSON_LINES], ".jsonl")
    yield _file("trace-csv", read_trace, study, lambda: [_AZURE, _BURST], ".csv")
    yield _file("trace-gz", read_trace, study, lambda: [gzip.compress(_JSON_LINES, mtime=0)], ".jsonl.gz")
    yield _file("gguf", model_files.read_gguf, model, lambda: model_files.gguf_seeds(_directory()), ".gguf", max_bytes=16_384)
    yield _file("tokenizer-json", model_files.read_tokenizer, model, model_files.tokenizer_seeds, ".json", max_bytes=16_384)
    yield _file("config-json", model_files.read_config, model, model_files.config_seeds, ".json")
    yield _file("safetensors", SafetensorsFile, model, _safetensors_seeds, ".safetensors")
    yield _file("model-card", card.read, model, _card_seeds, ".json")
    yield Decoder(name="profile", read=profile.decode, refusals=(profile.ProfileError,), seeds=_profile_seeds)


def _file(
    name: str,
    read: Callable[[Path], object],
    refusals: tuple[type[Exception], ...],
    seeds: Callable[[], Sequence[bytes]],
    suffix: str = "",
    max_bytes: int = 4096,
) -> Decoder:
    return Decoder(name=name, read=_by_file(read, suffix), refusals=refusals, seeds=seeds, max_bytes=max_bytes, quick=False)


_VLLM_CHAT = json.dumps(
    {
        "token_ids": [5, 9, 9, 6],
        "features": {"mm_hashes": {"image": ["ab" * 32]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}},
    }
).encode()
_CALL = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_READ = {"reasoning": "r", "content": "c", "tool_calls": [_CALL]}
_VLLM_READ = [
    json.dumps({"choices": [{"message": _READ}]}).encode(),
    json.dumps({"chunk": {"choices": [{"delta": _READ}]}, "stream_state": {"a": 1}}).encode(),
]
_VLLM_MODELS = json.dumps({"data": [{"id": "m", "parent": None}, {"id": "a", "parent": "m"}]}).encode()
_VLLM_SCORES = json.dumps(
    {"prompt_logprobs": [None, *({str(token): {"logprob": -1.5}, "7": {"logprob": -2}} for token in (2, 3))]}
).encode()
_VLLM_VECTORS = json.dumps({"data": [{"index": index, "embedding": "AACAPwAAAEA="} for index in (1, 0)]}).encode()


def _of_vllm() -> Iterable[Decoder]:
    yield Decoder(name="kv-events", read=_mirrored, refusals=(EventError,), seeds=lambda: [_KV_EVENTS, _KV_EVENTS_ARRAYS])
    yield Decoder(name="vllm-answer", read=_answered, refusals=(Nonsense,), seeds=lambda: [_VLLM_ANSWER])
    yield Decoder(name="vllm-read", read=what_was_read, refusals=(Nonsense,), seeds=lambda: _VLLM_READ)
    yield Decoder(name="vllm-models", read=partial(models_in, 200), seeds=lambda: [_VLLM_MODELS])
    prompt = pack_tokens([1, 2, 3])
    yield Decoder(
        name="vllm-scores",
        read=lambda raw: prompt_scores(raw, prompt, 2),
        refusals=(Nonsense,),
        seeds=lambda: [_VLLM_SCORES],
    )
    yield Decoder(name="vllm-chat", read=what_was_written, refusals=(Nonsense,), seeds=lambda: [_VLLM_CHAT])
    texts = Embed(pack_tokens([1, 2, 3]), Embedding((1, 2)), KEY)
    yield Decoder(
        name="vllm-vectors", read=lambda raw: vectors_in(raw, texts), refusals=(Nonsense,), seeds=lambda: [_VLLM_VECTORS]
    )


def _mirrored(raw: bytes) -> None:
    """Apply a batch to a mirror that has blocks, and once more."""
    mirror = Mirror(LAYOUT.block_tokens, 64, root_of_salt)
    for batch in (_KV_EVENTS_ARRAYS, raw, raw):
        mirror.apply(decode_batch(batch).events)
        mirror.check()


def _answered(raw: bytes) -> Answer:
    answer = Answer(limit=1 << 20)
    for data in EventLines().feed(raw):
        answer.take(data)
    return answer


_STORED = {
    "type": "BlockStored",
    "block_hashes": [KEY, 5],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [[["ab" * 32, 3], salt_of(KEY)], [["ab" * 32, -13]]],
}
_KV_EVENTS = msgpack.packb([1.5, [_STORED, {"type": "BlockRemoved", "block_hashes": [5]}, {"type": "AllBlocksCleared"}]])
_KV_EVENTS_ARRAYS = msgpack.packb([1.5, [["BlockStored", *list(_STORED.values())[1:]], ["BlockRemoved", [KEY], "GPU"]], 0])
_VLLM_ANSWER = (
    b"".join(
        b"data: " + json.dumps(each).encode() + b"\n\n"
        for each in (
            {"choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": None}]},
            {"choices": [{"index": 0, "token_ids": [3], "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
        )
    )
    + b"data: [DONE]\n\n"
)


DECODERS: dict[str, Decoder] = {
    each.name: each for each in (*_between_nodes(), *_of_stores(), *_of_people(), *_of_files(), *_of_vllm())
}


def _planted(raw: bytes) -> None:
    """Raise for a bug behind four bytes, found one after the other or not at all."""
    if len(raw) > 4 and raw[0] == 0xC1 and raw[1] == 0x5A and raw[2] == 0x07 and raw[3] == 0x81:
        raise KeyError(raw[:4])


PLANTED = Decoder(name="planted", read=_planted, seeds=lambda: [bytes(16)], max_bytes=64)
"""A decoder with a bug that only guidance finds, to show that the guide works."""
