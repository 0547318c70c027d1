"""The indexes of SSD tiers whose rows are not what anybody wrote: unusable, and no error that ends a node."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.ssd.disk_index import DiskIndex, IndexUnusable
from mooncake_zmq.pool.ssd.object_index import ObjectIndex


def damage(path: Path, statement: str) -> None:
    """STRICT keeps a type out that a flipped bit brings in, so it goes first."""
    for told in (("PRAGMA writable_schema = ON", "UPDATE sqlite_schema SET sql = replace(sql, ' STRICT', '')"), (statement,)):
        with closing(sqlite3.connect(path)) as db, db:
            for each in told:
                db.execute(each)


@pytest.mark.parametrize(
    "damaged",
    ["checksum = 'x'", "sequence = 'x'", "tokens = 7", "parent = 1.5", "tenant = x'00'", "slot = 'x'", "key = x'00'"]
    + ["sequence = 9223372036854775807", "sequence = -1"],
)
def test_a_row_of_blocks_that_is_none_is_unusable(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "index.sqlite"
    index = DiskIndex.open(path, "layout", 64)
    index.put([(DiskBlock(3, bytes(16), 1, None, b""), 1)])
    index.close()
    if damaged.startswith("slot"):
        damage(path, "ALTER TABLE blocks RENAME TO former")
        damage(path, "CREATE TABLE blocks AS SELECT 'x' AS slot, key, checksum, sequence, parent, tokens, tenant FROM former")
    else:
        damage(path, f"UPDATE blocks SET {damaged}")
    index = DiskIndex.open(path, "layout", 64)
    with pytest.raises(IndexUnusable):
        list(index.load(lambda done, total: None))
    index.close()


@pytest.mark.parametrize(
    "damaged",
    ["size = 'x'", "key = 'text'", "segment = NULL", "pin = 1.5", "checksum = x'00'"]
    + [f"{column} = 9223372036854775807" for column in ("sequence", "segment")],
)
def test_a_row_of_values_that_is_none_is_unusable(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "index.sqlite"
    index = ObjectIndex.open(path)
    index.put([("key", ObjectRecord(1, 1, 0, 10, 5, 0))])
    index.close()
    damage(path, "ALTER TABLE objects RENAME TO former")
    damage(path, "CREATE TABLE objects AS SELECT * FROM former")
    damage(path, f"UPDATE objects SET {damaged}")
    index = ObjectIndex.open(path)
    with pytest.raises(IndexUnusable):
        list(index.load(lambda done, total: None))
    index.close()


def test_an_index_whose_shape_is_of_other_types_is_unusable(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    DiskIndex.open(path, "layout", 64).close()
    damage(path, "UPDATE tier SET segment_slots = 'many'")
    with pytest.raises(IndexUnusable):
        DiskIndex.open(path, "layout", 64)
