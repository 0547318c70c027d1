"""Text to token ids and back, and the files of a model's tokenizer.

The libraries that open a vocabulary and render a template are imported where that is done: every node reads this module, and
only gateways open a tokenizer.
"""

import contextlib
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mooncake_zmq.core.chat import PLAIN_CHAT, ChatForm
from mooncake_zmq.engine.errors import ModelError, TemplateFailed
from mooncake_zmq.engine.text_cache import TextCache, cuts

if TYPE_CHECKING:
    import tokenizers

    from mooncake_zmq.engine.chat_template import ChatTemplate

VOCABULARY_FILE = "tokenizer.json"
CONVERSATION_FILE = "conversation.json"

PIECES_KEPT = 1 << 14
"""Tokens whose bytes are kept, and whose text: an answer with probabilities names the same likely ones twenty times a token."""

WORD_BEGINS = "\u2581"
"""SentencePiece's form of a space."""
BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""SentencePiece's form of a byte for which it has no token."""


def _byte_of() -> dict[str, int]:
    """Return GPT-2's names of bytes, all printable characters: a printable byte is itself, the others are those from U+0100
    on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_of()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The form of a model's conversations: all that a tokenizer needs beside the vocabulary."""

    template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool = False

    def chat_template(self) -> "ChatTemplate | None":
        """Return the compiled template, None if there is none. Raises ModelError if it does not parse."""
        if not self.template:
            return None
        from mooncake_zmq.engine.chat_template import ChatTemplate

        return ChatTemplate(self.template, bos_token=self.bos_token, eos_token=self.eos_token)


class Vocabulary(Protocol):
    """The mapping between text and ids."""

    @property
    def size(self) -> int: ...
    @property
    def longest_token(self) -> int:
        """The most characters of a text that one id stands for."""

    def encode(self, text: str, salt: str | None = None) -> "array[int]":
        """Return the ids of a text; with a `salt`, those of its parts that were tokenized with the same salt may be kept."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `ids`; `special`: with the names of special tokens."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, perhaps a part of a character. A special token's are those of its name."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that stand for no text."""

    @property
    def joins_bytes(self) -> bool:
        """Whether a text is exactly the bytes of its tokens one after the other."""


class Tokenizer:
    """One model's vocabulary and conversation format. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, conversation: Conversation) -> None:
        self._vocabulary = vocabulary
        self._piece = lru_cache(PIECES_KEPT)(vocabulary.piece)
        self._texts: dict[bool, Callable[[int], str]] = {
            False: lru_cache(PIECES_KEPT)(lambda token: vocabulary.decode([token])),
            True: lru_cache(PIECES_KEPT)(lambda token: vocabulary.decode([token], special=True)),
        }
        self.joins_bytes = vocabulary.joins_bytes
        self._conversation = conversation
        self._template = conversation.chat_template()
        self.vocab_size = vocabulary.size
        self.longest_token = vocabulary.longest_token
        self.special_ids = vocabulary.special_ids
        self.eos_ids = conversation.eos_ids
        self.chat_template = conversation.template or ""
        self.takes_tools = bool(re.search(r"\btools\b", self.chat_template))

    def encode(self, text: str, *, special: bool = True, salt: str | None = None) -> "array[int]":
        """Return the ids of `text`; with `special`, after the prefix that the model puts before a text (its BOS, if it has
        one). With a `salt`, parts that were tokenized with the same salt are not tokenized again (`text_cache.py`)."""
        ids = self._vocabulary.encode(_encodable(text), salt)
        if special and self._conversation.add_bos and self._conversation.bos_id is not None:
            ids.insert(0, self._conversation.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `ids`, without special tokens unless `special`."""
        return self._vocabulary.decode(ids, special=special)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, perhaps a part of a character. A special token's are those of its name."""
        return self._piece(token)

    def texts(self, special: bool) -> Callable[[int], str]:
        """Return a function that returns the text of one token by itself, as `decode` does."""
        return self._texts[special]

    def chat(
        self,
        messages: list[dict[str, Any]],
        form: ChatForm = PLAIN_CHAT,
        tools: list[dict[str, Any]] | None = None,
        *,
        salt: str | None = None,
    ) -> "array[int]":
        """Return the ids of a conversation, as the model's template writes it; `salt` as in `encode`. Raises TemplateFailed."""
        return self._vocabulary.encode(_encodable(self.chat_text(messages, form, tools)), salt)

    def chat_text(
        self, messages: list[dict[str, Any]], form: ChatForm = PLAIN_CHAT, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the text of a conversation, as the model's template writes it. Raises TemplateFailed."""
        if self._template is None:
            raise TemplateFailed("this model has no chat template: use /v1/completions")
        return self._template.text(messages, form, tools)


class BpeVocabulary:
    """A vocabulary in the format of the `tokenizers` library."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        from tokenizers.decoders import ByteLevel

        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.longest_token: int = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._of_bytes = b"ByteLevel" in decoder
        self.joins_bytes = isinstance(tokenizer.decoder, ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._cache = TextCache(self._encode, cuts([*added.items()], self._encode))
        self._added = frozenset(added)
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)

    def encode(self, text: str, salt: str | None = None) -> "array[int]":
        return self._cache.encode(text, salt)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # A batch, even of one: it releases the interpreter's lock while it works, and `encode` does not.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def piece(self, token: int) -> bytes:
        name: str = self._tokenizer.id_to_token(token) or ""
        if token in self._added:
            return name.encode()
        if self._of_bytes:
            return bytes(BYTE_OF[char] for char in name if char in BYTE_OF)
        if found := BYTE_FALLBACK.fullmatch(name):
            return bytes([int(found[1], 16)])
        return name.replace(WORD_BEGINS, " ").encode()


class ByteVocabulary:
    """A vocabulary whose ids 0..255 are bytes, then a few special tokens; ids beyond have no text of their own and read as
    <id>."""

    SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    END_ID = 256
    longest_token = max(map(len, SPECIAL))
    joins_bytes = True

    def __init__(self, size: int = 512) -> None:
        assert size >= 256 + len(self.SPECIAL)
        self.size = size
        self._special_ids = {token: 256 + offset for offset, token in enumerate(self.SPECIAL)}
        self.special_ids = frozenset(self._special_ids.values())
        self._split = re.compile("(" + "|".join(map(re.escape, self.SPECIAL)) + ")")
        self._pieces = [bytes([byte]) for byte in range(256)] + [b""] * len(self.SPECIAL)
        self._pieces += [f"<{token}>".encode() for token in range(len(self._pieces), size)]

    def encode(self, text: str, salt: str | None = None) -> "array[int]":
        ids = array("i")
        for piece in self._split.split(text):
            ids.extend([self._special_ids[piece]] if piece in self._special_ids else piece.encode())
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        pieces = map(self.piece, ids) if special else (self._pieces[token] for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        special = token - 256
        return self.SPECIAL[special].encode() if 0 <= special < len(self.SPECIAL) else self._pieces[token]


BYTE_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }} as <tool_call>{...}</tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


BYTE_CONVERSATION = Conversation(template=BYTE_TEMPLATE, eos_ids=(ByteVocabulary.END_ID,), eos_token=ByteVocabulary.SPECIAL[0])


def byte_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Return the tokenizer of "toy" and "dummy:*": one id per byte of UTF-8."""
    return Tokenizer(ByteVocabulary(vocab_size), BYTE_CONVERSATION)


def open_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer of a prepared model directory, or of "toy"."""
    if str(path) == "toy":
        return byte_tokenizer()
    directory = Path(path)
    conversation, fields = _read_conversation(directory)
    if conversation is BYTE_CONVERSATION:
        return byte_tokenizer(fields["vocab_size"])
    return Tokenizer(BpeVocabulary(read_vocabulary(directory / VOCABULARY_FILE)), conversation)


def read_conversation(directory: Path) -> Conversation:
    """Return the conversation of a prepared model: BYTE_CONVERSATION itself where ids are bytes."""
    return _read_conversation(directory)[0]


def _read_conversation(directory: Path) -> tuple[Conversation, dict[str, Any]]:
    try:
        fields = json.loads((directory / CONVERSATION_FILE).read_text())
        if fields.pop("kind") == "bytes":
            if type(fields["vocab_size"]) is not int or fields["vocab_size"] < 512:
                raise ValueError(f"a vocabulary of {fields['vocab_size']!r}")
            return BYTE_CONVERSATION, fields
        conversation = Conversation(**(fields | {"eos_ids": tuple(fields["eos_ids"])}))
        if not isinstance(conversation.template, str | None):
            raise ValueError("its chat template is no text")
        return conversation, fields
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{directory} is not a prepared model: {error}") from error


def fingerprint(path: Path | str) -> str:
    """Return a fingerprint of the files that `open_tokenizer` reads: most roles need nothing else of a tokenizer, which takes
    time to open."""
    digest = hashlib.sha256(b"toy" if str(path) == "toy" else b"")
    for name in (VOCABULARY_FILE, CONVERSATION_FILE):
        file = Path(path) / name
        if file.exists():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def read_vocabulary(path: Path) -> "tokenizers.Tokenizer":
    """Read a tokenizer.json, without the truncation and padding that a training left in it. Raises ModelError."""
    import tokenizers

    with library_errors(f"{path} is not a tokenizer that the tokenizers library can read"):
        vocabulary = tokenizers.Tokenizer.from_file(str(path))
    vocabulary.no_truncation()
    vocabulary.no_padding()
    return vocabulary


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of the tokenizers library, which raises bare `Exception`, into ours; it is caught here and nowhere else. A
    panic of its Rust code is a `BaseException`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise ModelError(f"{what}: {error}") from error
        raise


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The tokenizer that a source of weights has: `kind` describes it in words; without a vocabulary, ids are bytes."""

    kind: str
    vocabulary: "tokenizers.Tokenizer | None"
    conversation: Conversation


def byte_parts() -> TokenizerParts:
    return TokenizerParts("bytes", None, BYTE_CONVERSATION)


def write_parts(directory: Path, parts: TokenizerParts, vocab_size: int) -> None:
    """Write the files that `open_tokenizer` reads. Raises ModelError if the chat template does not parse."""
    parts.conversation.chat_template()
    if parts.vocabulary is None:
        write_byte_conversation(directory, vocab_size)
    else:
        with library_errors(f"{directory / VOCABULARY_FILE} cannot be written"):
            parts.vocabulary.save(str(directory / VOCABULARY_FILE))
        write_conversation(directory, parts.conversation)


def write_conversation(directory: Path, conversation: Conversation) -> None:
    (directory / CONVERSATION_FILE).write_text(json.dumps({"kind": "bpe"} | asdict(conversation), indent=1))


def write_byte_conversation(directory: Path, vocab_size: int) -> None:
    (directory / CONVERSATION_FILE).write_text(json.dumps({"kind": "bytes", "vocab_size": vocab_size}))


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates, which JSON can carry and UTF-8 cannot, replaced."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode()
