"""The models that a cluster serves, as the gateway knows them: limits, tokenizer and the namespace of a model's block keys."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mooncake_zmq.core.chat import PLAIN_CHAT, ChatForm
from mooncake_zmq.kv.block_hash import Key, extend_keys, namespace
from mooncake_zmq.kv.codec import CODECS, EXACT
from mooncake_zmq.kv.image_keys import Begin, keys_with_images


class Tokenizer(Protocol):
    """The part of `engine.tokenizer.Tokenizer` that the gateway uses. `encode` and `chat` run in threads too."""

    eos_ids: tuple[int, ...]
    vocab_size: int
    special_ids: frozenset[int]
    """Tokens that stand for no text."""
    longest_token: int
    """Characters of a text that one id stands for at most."""

    def encode(self, text: str, *, special: bool = True, salt: str | None = None) -> "array[int]":
        """`special`: with what the model puts before a text. `salt`: parts of the text that were tokenized with the same one
        need not be tokenized again."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: with the names of special tokens."""

    joins_bytes: bool
    """Whether a text is exactly the bytes of its tokens one after the other."""

    def texts(self, special: bool) -> Callable[[int], str]:
        """Return a function that returns the text of one token by itself, as `decode` does."""

    def piece(self, token: int) -> bytes:
        """The bytes that it stands for: perhaps a part of a character."""

    chat_template: str
    takes_tools: bool
    """Does that write them?"""

    def chat(
        self,
        messages: list[dict[str, Any]],
        form: ChatForm = PLAIN_CHAT,
        tools: list[dict[str, Any]] | None = None,
        *,
        salt: str | None = None,
    ) -> "array[int]":
        """Raises ValueError when the chat template refuses the messages."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model of this cluster, as clients and the block keys see it: the one that it serves, or that with an adapter."""

    id: str
    max_model_len: int
    """Tokens of prompt and output together that a decode holds at most."""
    vocab_size: int
    """Ids that both the engine and the tokenizer know."""
    block_tokens: int
    model_fingerprint: str
    layout_fingerprint: str
    tokenizer: Tokenizer
    max_positions: int = 0
    """Tokens of prompt and output together where a decode need not hold all of them; 0: `max_model_len`."""
    kv_codec: str = EXACT
    """How blocks hold its KV: the name of a codec, or exactly."""
    kv_bytes_per_token: int = 0
    """The bytes of a token's KV in blocks; 0: another program has its KV."""
    identity: str = ""
    """The identity with which its nodes greet, where the cluster has several models; empty: it has one."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters with which it is served too."""
    embeds: bool = False
    """Whether its answers are vectors of texts; otherwise they are tokens."""
    takes_images: bool = False
    """Whether its chats may have images, which a vLLM takes if the model does."""
    adapter: str = ""
    """The adapter that this is the model with; empty: none."""
    extend_keys: Callable[[bytes, bytes, int], list[Key]] = field(default=extend_keys, repr=False, compare=False)
    """`block_hash.extend_keys`, or what returns the same sooner."""

    @property
    def rounds_late(self) -> bool:
        """Whether KV is rounded only as it leaves the node that computed it, so that answers depend on where KV is from."""
        return self.kv_codec != EXACT and not CODECS[self.kv_codec].rounds_when_stored

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which clients ask for it, without an adapter and with each."""
        return self.id, *self.adapters

    def named(self, name: str) -> "ServedModel | None":
        """Return the model that a client asks for by this name, or None if there is none."""
        if name == self.id:
            return self
        return replace(self, id=name, adapter=name) if name in self.adapters else None

    def without(self, dropped: int) -> "ServedModel":
        """Return the model as it is for a request of whose prompt a decode does not hold so many tokens."""
        most = max(self.max_model_len, self.max_positions)
        return replace(self, max_model_len=min(most, self.max_model_len + dropped))

    @property
    def max_chars(self) -> int:
        """A longer text has more tokens than fit, whatever it says."""
        return self.max_model_len * self.tokenizer.longest_token

    def hash_prompt(self, tokens: bytes, salt: str, begins: Sequence[Begin] = ()) -> tuple[bytes, tuple[bytes, ...]]:
        """Namespace and keys of the complete blocks of `tokens` (int32 bytes), where the images `begins` begin."""
        root = namespace(model=self.model_fingerprint, layout=self.layout_fingerprint, salt=salt, adapter=self.adapter)
        return root, tuple(keys_with_images(root, tokens, self.block_tokens, begins, self.extend_keys))


class ServedModels:
    """All models of a cluster, by the names that clients use."""

    def __init__(self, *models: ServedModel) -> None:
        """`models`: at least one, without adapters. Raises ValueError if two have a name in common."""
        self.each = models
        self.names = tuple(name for model in models for name in model.names)
        """The names of all, in the order of the models."""
        if repeated := next((name for name in self.names if self.names.count(name) > 1), None):
            raise ValueError(f"two models are called {repeated!r}: give one of them another name")

    @property
    def only(self) -> ServedModel | None:
        """The model of a cluster that has one, which clients need not name."""
        return self.each[0] if len(self.each) == 1 else None

    @property
    def shown(self) -> str:
        """The names of the models, without those with adapters, as one text."""
        return ", ".join(model.id for model in self.each)

    @property
    def identities(self) -> tuple[str, ...]:
        """The identity of each model; an empty one if there is one model."""
        return tuple(model.identity for model in self.each)

    @property
    def longest_context(self) -> int:
        """Tokens that a prompt and its answer may have together at most, with any model."""
        return max(model.max_model_len for model in self.each)

    def named(self, name: str) -> ServedModel | None:
        """Return the model that a client asks for by this name, or None if there is none."""
        return next((found for model in self.each if (found := model.named(name)) is not None), None)
