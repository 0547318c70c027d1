"""One thing that was looked at: what was found, and what to change if it is not well. And whose nodes it is looked at for."""

from dataclasses import dataclass
from typing import Any, Literal

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import Config, NodeSettings

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
"""In rising order: a warning works, but not well or not for long; with a problem some node does not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice`: the command or setting that helps; empty only where all is well."""

    area: str
    level: Level
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "ok") != bool(self.advice), f"{self.found}: advice goes with what is not well"


@dataclass(frozen=True, slots=True)
class Here:
    """A deployment and which of its nodes are this machine's. `running`: their processes, by name of the node."""

    loaded: Loaded
    nodes: tuple[NodeSettings, ...]
    running: dict[str, int]

    @property
    def config(self) -> Config:
        """The whole deployment's."""
        return self.loaded.config

    def section(self, node: NodeSettings) -> Any:
        """The settings of a node's role."""
        return self.loaded.section(node)

    def of_role(self, *roles: str) -> tuple[NodeSettings, ...]:
        """This machine's nodes of these roles."""
        return tuple(node for node in self.nodes if node.role in roles)
