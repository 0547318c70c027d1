"""The cluster's model as a process knows it. Processes with an engine have its weights prepared, the others never do."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from msgspec import structs

from mooncake_zmq.config.records import Config, NodeSettings
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.engine.card import ModelCard
from mooncake_zmq.engine.cpu import Backend
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.spec import FAMILIES, ModelSpec
from mooncake_zmq.kv.codec import CODECS, EXACT
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.runtime import notify

log = structlog.get_logger()

POLL_S = 0.5
WAIT_S = 3600.0
"""How long a process waits until an engine of its host has prepared the model: a large one is downloaded and converted."""
WHAT_TO_DO = (
    "it does not download or convert a model: set model.card to the file that 'mooncake-zmq model card MODEL' "
    "prints where the model is"
)


NO_MODEL = ModelCard(
    spec=ModelSpec(
        name="none",
        layers=1,
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        ffn=1,
        vocab_size=1,
        max_positions=1,
        rope_theta=1.0,
        norm_eps=1.0,
        tied=False,
        eos_ids=(),
        bos_id=None,
        fingerprint="none",
    ),
    tokenizer="none",
)
"""The card in place of a model's where no node computes: the smallest shape, of which no block will exist."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model before its weights are mapped. `path`: the prepared directory, "toy", or the directory of the tokenizer and
    card."""

    path: Path
    card: ModelCard
    max_model_len: int
    identity: str
    """Identity of what the engines compute, which peers compare and keys of blocks begin with."""
    codec: str = EXACT
    """The codec of blocks."""
    foreign: bool = False
    """Whether another program computes the model, in KV of its own: our blocks are then as small as possible, and none
    exist."""

    @property
    def spec(self) -> ModelSpec:
        """Shape and identity of the model."""
        return self.card.spec

    @property
    def tokenizer(self) -> str:
        """Fingerprint of the tokenizer."""
        return self.card.tokenizer

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's KV in blocks, or of another program's as it computes it."""
        return self.spec.kv_bytes_per_token if self.codec == EXACT else self.layout(1).token_bytes

    def layout(self, block_tokens: int) -> BlockLayout:
        if self.foreign:
            vocab_size = self.spec.vocab_size
            return BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=block_tokens, vocab_size=vocab_size)
        return BlockLayout(
            layers=self.spec.layers,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            block_tokens=block_tokens,
            dtype=self.spec.kv_dtype,
            hidden_bytes=4 * self.spec.hidden,
            vocab_size=self.spec.vocab_size,
            has_offsets=FAMILIES[self.spec.family].qkv_bias,
        ).coded(self.codec)


def learn(config: Config, node: NodeSettings, sleep: Callable[[float], None] = time.sleep) -> Model:
    """Return the model as `node`'s role needs it: an engine has it prepared, the others read its card. Raises ModelError."""
    if config.model.engine == "vllm":
        return replace(_bounded(config, *_described(config)), foreign=True)
    if config.model.engine == "none":
        return replace(_bounded(config, Path(), NO_MODEL), foreign=True)
    if node.computes or config.model.path == "toy":
        return prepared(config, node.prepared_for)
    if config.model.card:
        return _of_card(config, Path(config.model.card).expanduser(), with_tokenizer=node.role == "gateway")
    if node.role in ENGINE_ROLES:
        return prepared(config)  # a modelled engine does not use the weights, but needs the model's fingerprint
    return _model(config, _prepared_by_another(config, node, sleep))


def prepared(config: Config, backend: Backend = "numpy") -> Model:
    """Return the prepared model, converting it if it is not yet. Raises ModelError."""
    from mooncake_zmq.engine.prepare import prepare, remove_former  # maps BLAS: only after the thread count is set

    said = ""

    def progress(what: str, share: float) -> None:
        nonlocal said
        if what != said:
            said = what
            log.info("model", what=what)
        notify.status(f"{what}, {share:.0%}")

    path = prepare(config.model.path, config.model.cache_dir, progress, backend=backend, codec=config.model.kv_codec)
    for former in remove_former(path):
        log.info("former_model_removed", path=str(former))
    return _model(config, path)


def _model(config: Config, path: Path) -> Model:
    from mooncake_zmq.engine import card

    return _bounded(config, path, card.of_prepared(path))


def _of_card(config: Config, path: Path, *, with_tokenizer: bool) -> Model:
    from mooncake_zmq.engine import card, tokenizer

    found = card.read(path)
    if with_tokenizer and tokenizer.fingerprint(path.parent) != found.tokenizer:
        raise ModelError(
            f"a gateway needs the model's tokenizer beside {path}: 'mooncake-zmq model card MODEL --to DIR' writes both"
        )
    return _bounded(config, path.parent, found)


def _described(config: Config) -> tuple[Path, ModelCard]:
    from mooncake_zmq.engine.described import describe

    return describe(config.model.path, config.model.cache_dir, config.model.name)


def _bounded(config: Config, path: Path, card: ModelCard) -> Model:
    if config.model.name:
        card = structs.replace(card, spec=replace(card.spec, name=config.model.name))
    codec = config.model.kv_codec
    if codec != EXACT and (refusal := CODECS[codec].refusal(card.spec.head_dim)):
        raise ModelError(refusal)
    longest = min(config.model.max_model_len, card.spec.max_positions)
    return Model(path, card, longest, _identity(config, card.spec.fingerprint), codec)


def _identity(config: Config, fingerprint: str) -> str:
    """Return the fingerprint, or another where any engine is modelled: its KV is not the model's, and may stay on an SSD."""
    if not any(node.modelled for node in config.nodes):
        return fingerprint
    return hashlib.sha256(f"modelled {fingerprint}".encode()).hexdigest()[: len(fingerprint)]


def _prepared_by_another(config: Config, node: NodeSettings, sleep: Callable[[float], None]) -> Path:
    """Return the prepared directory, once an engine of this machine has created it. Raises ModelError where none will."""
    from mooncake_zmq.engine.prepare import is_prepared, located

    try:
        path = located(config.model.path, config.model.cache_dir)
    except ModelError as error:
        raise ModelError(f"{error}; a {node.role} needs no weights, but {WHAT_TO_DO}") from error
    waited_s = 0.0
    while not is_prepared(path):
        if not _has_engine_beside(config, node):
            raise ModelError(
                f"model {config.model.path} is not prepared here, and a {node.role} needs no weights: {WHAT_TO_DO}"
            )
        if waited_s >= WAIT_S:
            raise ModelError(f"model {config.model.path} was not prepared by an engine of this machine in {WAIT_S:.0f} s")
        if not waited_s:
            log.info("waiting_for_model", path=str(path), host=node.host)
        sleep(POLL_S)
        waited_s += POLL_S
    return path


def _has_engine_beside(config: Config, node: NodeSettings) -> bool:
    """Return whether an engine shares `node`'s machine: one of its host does, and so does one that is reached over an ipc
    socket."""
    engines = config.of_role(*ENGINE_ROLES)
    return any(engine.host == node.host or config.endpoint(engine).startswith("ipc://") for engine in engines)
