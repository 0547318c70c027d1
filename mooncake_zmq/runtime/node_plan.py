"""A node as the deployment's file and its model define it, before any component of it is opened."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mooncake_zmq.config.checks import check_local_reads, check_open
from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello, SegmentRef
from mooncake_zmq.core.routes import Member, may_connect
from mooncake_zmq.core.session import Session
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.roles import PARTS
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.model import Model, learn
from mooncake_zmq.runtime.starvation import waits_for_cpu


@dataclass(frozen=True)
class NodePlan:
    """Settings of one node in its role, with the model that its cluster serves. `others`: further models, of a node that is
    for all of several."""

    loaded: Loaded
    node: NodeSettings
    model: Model
    others: tuple[Model, ...] = ()

    @classmethod
    def learn(cls, loaded: Loaded, node: NodeSettings) -> "NodePlan":
        """Return the plan of a node. May take long: an engine's model is downloaded and converted. Raises ConfigError and
        ModelError."""
        if node.device == "cuda":
            _find_device(loaded, node)
        with notify.extended_timeout("waiting for the model"):
            first, *others = [learn(each.config, node) for each in loaded.of_each]
        return cls(loaded, node, first, tuple(others))

    @cached_property
    def settings(self) -> Any:
        """The section of the node's role."""
        return self.loaded.section(self.node)

    @cached_property
    def layouts(self) -> dict[str, BlockLayout]:
        """The layout of each model's blocks, by the model's identity, in the order of the file."""
        each = zip(self.loaded.of_each, (self.model, *self.others), strict=True)
        return {model.identity: model.layout(loaded.config.model.block_tokens) for loaded, model in each}

    @property
    def layout(self) -> BlockLayout:
        """The layout of the blocks of the model, or of the first of several, whose nodes have no blocks."""
        return self.layouts[self.model.identity]

    @cached_property
    def costs(self) -> Costs:
        """The configured costs; raises ConfigError for a profile of another model."""
        costs = self.loaded.config.costs
        if self.others:
            return costs  # no node that is for all of several models predicts times
        try:
            costs.check_model(self.model.spec.fingerprint)
        except ValueError as error:
            raise ConfigError(f"costs.profile: {error}") from None
        # The cost model needs the model's own size, whatever the file says. To decode KV takes as long as to place it exactly.
        coded, exact = self.model.kv_bytes_per_token, self.model.spec.kv_bytes_per_token
        return replace(costs, kv_bytes_per_token=coded, load_bytes_per_s=costs.load_bytes_per_s * coded / exact)

    @property
    def runtime_dir(self) -> Path:
        """The directory of sockets, locks and the operator's files."""
        return Path(self.loaded.config.cluster.runtime_dir)

    @property
    def endpoint(self) -> str:
        """Where the node listens for its peers."""
        return self.loaded.config.endpoint(self.node)

    @cached_property
    def peers(self) -> dict[str, NodeSettings]:
        """Nodes that this one exchanges messages with, by name."""
        node, config = self.node, self.loaded.config
        vllm_parts = {self.loaded.section(each).part for each in config.of_role("vllm")}
        exchanges = partial(
            may_connect,
            pipelines=config.conductor.pipeline_stages > 1,
            watched=True,
            disaggregated=len(vllm_parts) > 1,
            lending=self.loaded.lends,
        )
        return {
            peer.name: peer
            for peer in config.nodes
            if peer.name != node.name and exchanges(node.roles, node.host, peer.roles, peer.host)
        }

    @property
    def peer_endpoints(self) -> dict[str, str]:
        """Endpoints of the peers, by name."""
        return {name: self.loaded.config.endpoint(peer) for name, peer in self.peers.items()}

    def actor_settings(self) -> Any:
        """Return the section of the role, with the names of nodes that the file omits."""
        config = self.loaded.config
        match self.node.role:
            case "gateway":
                requests = self.settings.requests
                conductors = requests.conductors or tuple(node.name for node in config.of_role("conductor"))
                return replace(requests, conductors=conductors)
            case "conductor":
                nodes = config.of_role("prefill", "decode", "cache-node", "vllm")
                members = self.settings.members or tuple(node.name for node in nodes)
                longest = self.loaded.longest_request(self.model.max_model_len, self.layout.block_tokens)
                return replace(self.settings, members=members, longest_request=self.settings.longest_request or longest)
        return self.settings

    def session(self, incarnation: int, segment: SegmentRef | None) -> Session:
        """Return a session that greets the peers as this node. `segment`: where they read its blocks."""
        node = self.node
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role=node.role,
            host=node.host,
            model=_joined(self.layouts),
            tokenizer=_joined(model.tokenizer for model in (self.model, *self.others)),
            layout=_joined(layout.fingerprint for layout in self.layouts.values()),
            segment=segment,
            may_become=node.may_become,
            part=self.settings.part if node.role == "vllm" else "both",
        )
        return Session(
            me=node.name,
            incarnation=incarnation,
            hello=hello,
            peers={name: Member(peer.roles, peer.host, self._fingerprints(peer)) for name, peer in self.peers.items()},
            settings=self.loaded.config.session,
            now=time.monotonic(),
            starved=partial(waits_for_cpu, self.runtime_dir),
        )

    def _fingerprints(self, peer: NodeSettings) -> dict[str, str]:
        """Return the fingerprints of the one of several models that a peer is for; none if there is one model, or it is for
        all."""
        if not (self.others and peer.model):
            return {}
        model = (self.model, *self.others)[list(self.loaded.models).index(peer.model)]
        layout = self.layouts[model.identity]
        return {"model": model.identity, "tokenizer": model.tokenizer, "layout": layout.fingerprint}

    def segment_slots(self, node: NodeSettings) -> int:
        """Return the number of slots of `node`'s segment in its role; 0: it has none. Raises ConfigError for one that is too
        small."""
        setting, section = PARTS[node.role].segment_setting, node.role.replace("-", "_")
        slots = PARTS[node.role].segment_slots(self.loaded.section(node), self.layout)
        if setting and slots < 1:
            raise ConfigError(f"{section}.{setting} is less than one slot of {self.layout.slot_bytes} bytes")
        needed = self.layout.blocks_for(self.model.max_model_len)
        if node.role == "prefill" and slots < needed:
            raise ConfigError(
                f"{section}.{setting} holds {slots} blocks, and a request of model.max_model_len {self.model.max_model_len} "
                f"needs {needed}: raise it to {needed * self.layout.slot_bytes}, or lower max_model_len"
            )
        return slots


def _joined(fingerprints: Iterable[str]) -> str:
    """Return the fingerprints of several models as a greeting has them."""
    return " ".join(sorted(set(fingerprints)))


def check(loaded: Loaded, node: NodeSettings) -> None:
    """Raise ConfigError if the node must not start with these settings on this machine."""
    check_open(loaded, [node])
    check_local_reads(loaded, [node])


def _find_device(loaded: Loaded, node: NodeSettings) -> None:
    """Raise ConfigError for a missing device, before a model is prepared for it."""
    from mooncake_zmq.engine.backend import array_namespace, keep_kernels_in
    from mooncake_zmq.engine.prepare import default_cache_dir

    cache_dir = loaded.config.model.cache_dir
    keep_kernels_in(Path(cache_dir) if cache_dir else default_cache_dir())
    try:
        array_namespace(node.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
