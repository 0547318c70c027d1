"""The index of a store's SSD tier: which value stands where in its segment files, in one SQLite database.

A row is written after the bytes that it names are synced, and deleted, durably, before its key may get another value. See
`disk_index.py` for why SQLite, and for what it promises.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mooncake_zmq.kv.object_record import VERSION, ObjectRecord
from mooncake_zmq.pool.ssd.disk_index import MAX_SEQUENCE, IndexUnusable, damage_reported, in_order, opened, signed

APPLICATION_ID = 0x4D4F4F4E
"""In SQLite's header: such a file is a store's index, and nothing else's."""
_U64 = (1 << 64) - 1
_ROWS = frozenset(((bytes, int, int, int, int, int, int),))
"""The types of a row as `load` reads it."""
_SCHEMA = (
    "CREATE TABLE objects (sequence INTEGER PRIMARY KEY, key BLOB NOT NULL, segment INTEGER NOT NULL,"
    " offset INTEGER NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL, pin INTEGER NOT NULL) STRICT"
)


class ObjectIndex:
    """Safe to call from several threads. All methods but `open` and `load` raise `IndexFault` alone."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> "ObjectIndex":
        """Open the database, or make an empty one. Raises `IndexUnusable`, `IndexFault` or OSError."""
        with opened(path) as db:
            _make_or_know(db, path)
            return cls(db)

    def load(self, progress: Callable[[int, int], None]) -> Iterator[tuple[str, ObjectRecord]]:
        """All rows in the order of their sequence. Raises `IndexUnusable` or `IndexFault`.

        `progress(done, total)` is called before the first and after every `ROWS_PER_PIECE` rows.
        """
        with self._lock, damage_reported("the index"):
            columns = "key, sequence, segment, offset, size, checksum, pin"
            rows = in_order(self._db, "objects", columns, _ROWS, progress)
            for key, sequence, segment, offset, size, checksum, pin in rows:
                numbers = (sequence, segment, offset, pin)
                if min(numbers) < 0 or max(numbers) >= MAX_SEQUENCE or size < 1 or pin > 3:
                    raise IndexUnusable(f"row {sequence} has entries of {size} bytes at {offset} of segment {segment}")
                try:
                    name = key.decode()
                except UnicodeDecodeError as error:
                    raise IndexUnusable(f"row {sequence} has key {key!r}") from error
                yield name, ObjectRecord(sequence, segment, offset, size, checksum & _U64, pin)

    def put(self, rows: Iterable[tuple[str, ObjectRecord]]) -> None:
        """Add these; all of them or none, durable on return."""
        values = [(r.sequence, key.encode(), r.segment, r.offset, r.size, signed(r.checksum), r.pin) for key, r in rows]
        with self._lock, self._db:
            self._db.executemany("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def change(self, *, moved: Iterable[ObjectRecord] = (), gone: Iterable[int] = ()) -> None:
        """Record new places of records, and delete others by their sequence; all of it or nothing, durable on return."""
        with self._lock, self._db:
            places = [(record.segment, record.offset, record.sequence) for record in moved]
            self._db.executemany("UPDATE objects SET segment = ?, offset = ? WHERE sequence = ?", places)
            self._db.executemany("DELETE FROM objects WHERE sequence = ?", [(sequence,) for sequence in gone])

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._db.close()


def _make_or_know(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if not version and not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
        with db:
            db.execute("BEGIN")
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {VERSION}")
    elif (application, version) != (APPLICATION_ID, VERSION):
        raise IndexUnusable(f"{path} is not the index of a store, or not of version {VERSION}")
