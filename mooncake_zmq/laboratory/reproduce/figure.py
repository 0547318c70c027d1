"""The data of a reproduced figure: settings with their sources, rows, conclusions, curves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mooncake_zmq.laboratory.profiles import A800, H800, Source
from mooncake_zmq.laboratory.study import NodeProfile, RunResult, Setup

HARDWARE: tuple[NodeProfile, ...] = (A800, H800)
"""The paper's hardware, and another one on which conclusions must hold too."""
PAPER = A800


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `source`: the paper, a measurement or an assumption."""

    name: str
    value: str
    source: Source
    why: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of ours beside the paper's, where it gives one."""

    name: str
    unit: str
    ours: float
    paper: float | None = None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A statement of the paper, in how many variants it was tried, and in which it does not hold."""

    text: str
    tried: int
    breaks: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether it holds in all variants."""
        return not self.breaks


@dataclass(slots=True)
class Figure:
    """All results of one figure. `curves`: by label, points of `axes`."""

    name: str
    title: str
    settings: list[Setting]
    rows: list[Row] = field(default_factory=list)
    conclusions: list[Conclusion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")


Measured = Mapping[str, float]
"""The measures of one arm, by name."""
Arms = Mapping[str, Measured]
Holds = Callable[[Arms], bool]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A setting that no paper gives: key and values as `--set` takes them. `arms`: those it concerns, all if none."""

    key: str
    value: str
    other: str
    why: str
    arms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A figure that is replayed: every arm, under every assumption's other value, on every hardware."""

    name: str
    title: str
    base: Setup
    arms: Mapping[str, tuple[tuple[str, str], ...]]
    """The settings of each arm on top of the base."""
    measure: Callable[[RunResult], dict[str, float]]
    settings: tuple[Setting, ...]
    assumptions: tuple[Assumption, ...]
    claims: tuple[tuple[str, Holds], ...]
    units: Mapping[str, str]
    """The unit of each measure that is shown, in order."""
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The paper's figures, by arm and measure."""
    notes: tuple[str, ...] = ()
    output_tokens: int | None = None
    """Output tokens of every request, if not those of the trace."""
    x: str = ""
    """The abscissa over which arms are points of a curve; they are then named by numbers."""
