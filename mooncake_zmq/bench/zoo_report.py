"""The output of `bench zoo`, replayed or live: a row for each workload, as a table or as one JSON object."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

import click
from rich.table import Table

from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.reports import commit, machine


class ZooLine(Protocol):
    """A row: a dataclass whose fields are the JSON."""

    COLUMNS: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def group(self) -> str:
        """The group of the row; a line is drawn where it changes."""

    def cells(self) -> Iterable[str]:
        """Return a text for each column."""


@dataclass(slots=True)
class ZooReport:
    """The result of a run of the zoo, and notes that a reader must know beside it."""

    title: str
    rows: Sequence[ZooLine]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return `{"bench", "commit", "machine", "title", "rows": [{"name", "ratio", and the row's fields}], "notes"}`."""
        stamp = {"bench": "zoo", "commit": commit(), "machine": machine(), "title": self.title}
        return stamp | {"rows": [_named(asdict(row)) for row in self.rows], "notes": self.notes}

    def show(self, *, as_json: bool) -> None:
        """Print to standard output."""
        if as_json:
            click.echo(json.dumps(self.as_json()))
            return
        tables.show([self._table()], (f"  {note}" for note in self.notes))

    def _table(self) -> Table:
        columns = self.rows[0].COLUMNS if self.rows else ()
        title = f"bench zoo, {self.title}  ({commit()}, {machine()})"
        table = tables.empty(title, columns, text=("workload", "policy"))
        for at, row in enumerate(self.rows):
            last = at + 1 == len(self.rows) or self.rows[at + 1].group != row.group
            table.add_row(*row.cells(), end_section=last)
        return table


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields after those that any benchmark's row has. `ratio`: the clairvoyant's computed tokens over the row's,
    times the share of requests that finished."""
    name = f"{fields['workload']}, {fields.get('policy', 'live')}"
    regret = fields["regret"]
    return {"name": name, "ratio": fields["finished"] / fields["requests"] / regret if regret else 0.0} | fields
