"""The table of what one tenant can take: each setting it names is there, with the default that it tells."""

import re
from dataclasses import fields
from functools import reduce
from pathlib import Path

from mooncake_zmq.config.records import Config
from mooncake_zmq.gateway.http.auth import LATEST_S, REFUSALS_PER_S
from mooncake_zmq.gateway.requests.tenants import Tenant

PAGE = Path(__file__).parent.parent / "mooncake_zmq/docs/operating.md"
TABLE = PAGE.read_text().partition("## What one tenant can take\n")[2].partition("\n`bin/chaos --tenants`")[0]
DEFAULT = re.compile(r"`((?:gateway|prefill|decode|cache_node)\.[a-z_.]+|--[a-z]+)` \(([0-9.]+|none)[:)]")


def default_of(name: str) -> object:
    if name.startswith("--"):
        return next(field.default for field in fields(Tenant) if field.name == name[2:])
    return reduce(getattr, name.split("."), Config())


def test_each_setting_of_the_table_has_that_default() -> None:
    told = DEFAULT.findall(TABLE)
    assert len(told) >= 28
    for name, said in told:
        default = default_of(name)
        assert default == ("" if said == "none" else float(said)), name


def test_no_setting_is_named_without_a_default_that_is_checked() -> None:
    named = re.findall(r"`(--[a-z]+|(?:gateway|prefill|decode)\.[a-z_.]+)`", TABLE.partition("\n\n| of |")[2])
    assert sorted(named) == sorted(name for name, _ in DEFAULT.findall(TABLE) if not name.startswith("cache_node"))


def test_refusals_are_put_off_as_the_table_tells() -> None:
    assert f"| refusals | {REFUSALS_PER_S} a second |" in TABLE
    assert f"put off by up to {LATEST_S:g} s" in TABLE
