"""The output of `bench zoo`, replayed or live: a row for each workload, as a table or as one JSON object."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rich.table import Table

from mooncake_zmq.bench.report import Report
from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.reports import commit, machine


@dataclass(frozen=True, slots=True)
class ZooLine:
    """A row, whose fields are the JSON."""

    COLUMNS: ClassVar[tuple[str, ...]]

    @property
    def group(self) -> str:
        """The group of the row; a line is drawn where it changes."""
        return ""

    def cells(self) -> Iterable[str]:
        """Return a text for each column."""
        raise NotImplementedError


@dataclass(slots=True)
class ZooReport(Report):
    """The result of a run of the zoo."""

    title: str = ""
    lines: Sequence[ZooLine] = ()

    def as_json(self) -> dict[str, Any]:
        """Return `{"bench", "commit", "machine", "title", "rows": [{"name", "ratio", and the row's fields}], "notes"}`."""
        whole = Report.as_json(self) | {"title": self.title, "rows": [_named(asdict(line)) for line in self.lines]}
        del whole["memory"]
        return whole

    def _tables(self) -> Iterator[Table]:
        columns = self.lines[0].COLUMNS if self.lines else ()
        title = f"bench zoo, {self.title}  ({commit()}, {machine()})"
        table = tables.empty(title, columns, text=("workload", "policy"))
        for at, line in enumerate(self.lines):
            last = at + 1 == len(self.lines) or self.lines[at + 1].group != line.group
            table.add_row(*line.cells(), end_section=last)
        yield table


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields after those that any benchmark's row has. `ratio`: the clairvoyant's computed tokens over the row's,
    times the share of requests that finished."""
    name = f"{fields['workload']}, {fields.get('policy', 'live')}"
    regret = fields["regret"]
    return {"name": name, "ratio": fields["finished"] / fields["requests"] / regret if regret else 0.0} | fields
