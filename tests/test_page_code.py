"""The Python and the settings that pages show are run and read, and the addresses in them are those of the example settings."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from page_commands import PAGES, ROOT
from ports import free_port
from store_servers import store_servers

from mooncake_zmq.cli import main
from mooncake_zmq.config.load import load
from mooncake_zmq.config.ports import ports

TESTED = {"sh", "python", "toml", "yaml"}
SHOWN = {"json", "nginx", ""}
"""An answer, another program's settings, and drawings."""
NODES = (ROOT / "configs/toy.toml").read_text().partition("[[nodes]]")[2]
SIM = "--generate conversation:requests=20 --sweep policy=global,local --rows rows.npz"


def blocks(form: str | None = None) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if form in (None, kind):
                yield (kind if form is None else page.stem), text


def test_every_form_of_block_is_tested_or_only_shown() -> None:
    assert {kind for kind, _ in blocks()} == TESTED | SHOWN


@pytest.mark.parametrize("page", sorted({page for page, _ in blocks("toml")}))
def test_the_settings_of_a_page_together_are_a_configuration(page: str, tmp_path: Path) -> None:
    shown = [text.partition("[[nodes]]") for of, text in blocks("toml") if of == page]
    given = [each for _, heading, text in shown for each in tomllib.loads(heading + text).get("nodes", [])]
    # A page with a gateway shows all nodes of a deployment, another one some of those of the toy.
    is_whole = any(each.get("role") == "gateway" for each in given)
    nodes = {each["name"]: each for each in tomllib.loads(f"[[nodes]]{NODES}")["nodes"] if not is_whole}
    for each in given:
        nodes[each["name"]] = nodes.get(each["name"], {}) | each
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join([*(text for text, _, _ in shown), *map(_table, nodes.values())]))
    assert load(path).config.nodes


def _table(node: dict[str, Any]) -> str:
    return "\n".join(["[[nodes]]", *(f"{key} = {_value(value)}" for key, value in node.items())])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(each)}' for key, each in value.items())} }}"
    return repr(value)


def test_the_laboratorys_code_reads_rows_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["sim", *SIM.split()]).exit_code == 0
    (code,) = [text for page, text in blocks("python") if page == "laboratory"]
    exec(compile(code, "laboratory.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["global", "local"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The address of a store, which is closed whatever becomes of the test."""
    address = f"127.0.0.1:{free_port()}"
    with store_servers(tmp_path, slabs=4, slab_bytes=1 << 20) as make:
        make(endpoint=f"tcp://{address}")
        yield address


def test_the_pools_code_puts_and_gets_a_value(store: str) -> None:
    (code,) = [text for page, text in blocks("python") if page == "pool"]
    known: dict[str, object] = {}
    try:
        exec(compile(code.replace("127.0.0.1:7301", store), "pool.md", "exec"), known)
        assert known["store"].get("key") == b"value"
        assert known["store"].get("missing") == b""
    finally:
        known["store"].close()


def test_prometheus_is_sent_to_the_ports_of_the_example() -> None:
    (text,) = [text for _, text in blocks("yaml")]
    told = set(re.findall(r'"localhost:(\d+)"', text))
    listed = ports(load(ROOT / "configs/two-hosts.toml"))
    assert told == {port.address.rpartition(":")[2] for port in listed if port.what == "metrics" and port.host == "host-a"}
