"""The result of one check: what was found and what to change if it is not well, and the nodes that were checked."""

from dataclasses import dataclass
from typing import Any, Literal

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import Config, NodeSettings

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
"""The levels in rising order. Warning: it works, but not well or not for long. Problem: a node does not run with it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `advice` is the command or setting that helps, empty only if all is well."""

    area: str
    level: Level
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "ok") != bool(self.advice), f"{self.found}: advice goes with what is not well"


@dataclass(frozen=True, slots=True)
class Here:
    """A deployment, and its nodes on this machine; `running` holds their processes by name of the node."""

    loaded: Loaded
    nodes: tuple[NodeSettings, ...]
    running: dict[str, int]

    @property
    def config(self) -> Config:
        """The settings of the whole deployment."""
        return self.loaded.config

    def section(self, node: NodeSettings) -> Any:
        """Return the settings of a node's role."""
        return self.loaded.section(node)

    def of_role(self, *roles: str) -> tuple[NodeSettings, ...]:
        """Return this machine's nodes of these roles."""
        return tuple(node for node in self.nodes if node.role in roles)
