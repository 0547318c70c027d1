"""The manual: every link leads somewhere, every alarm there is stands in it, and no command or file that there is not."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.engine.constraint import Compiler, ConstraintError
from mooncake_zmq.engine.tokenizer import byte_tokenizer
from mooncake_zmq.gateway.openai.constraints import of_schema
from mooncake_zmq.gateway.requests.cluster_snapshot import REASONS
from mooncake_zmq.gateway.settings import EdgeSettings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "mooncake_zmq/docs"
README = ROOT / "README.md"
PAGES = {path: path.read_text() for path in [README, *sorted(DOCS.glob("*.md"))]}
OPERATING = PAGES[DOCS / "operating.md"]
ALARM = re.compile(r'log\.(?:error|critical)\(\s*"([a-z_]+)"')
LINE = re.compile(r'log\.(?:warning|error|critical)\(\s*"([^"]+)"')
IN_VLLMS_LOG = {
    "no store of %s answers yet: %s",
    "the files of %s are not at hand: its KV is not shared unless the setting 'model' names its weights",
    "this model's keys have biases: with a kv_codec its answers from stores differ more than other models'",
}
"""Sentences of the connector, which say by themselves what is to be known."""
QUOTED = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"mooncake-zmq ((?:(?:config|bench|keys|model) )?[a-z]+)\b")
SOURCES = {path: path.read_text() for path in (ROOT / "mooncake_zmq").rglob("*.py")}


def anchors(text: str) -> set[str]:
    """As repositories' browsers make them."""
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def links() -> Iterator[tuple[Path, str]]:
    for page, text in PAGES.items():
        for link in LINK.findall(text):
            if not link.startswith("http"):
                yield page, link


@pytest.mark.parametrize(("page", "link"), list(links()), ids=lambda value: value if isinstance(value, str) else value.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path, link: str) -> None:
    file, _, heading = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    assert target.exists()
    assert not heading or heading in anchors(target.read_text())


def test_the_readme_leads_to_every_page() -> None:
    linked = {(README.parent / link).resolve() for link in LINK.findall(PAGES[README])}
    assert sorted(path.stem for path in PAGES if path != README and path not in linked) == []


def test_the_readme_is_read_in_a_sitting() -> None:
    assert len(PAGES[README].splitlines()) <= 150


def test_every_error_of_the_log_is_an_alarm_with_something_to_do() -> None:
    told = {name for text in SOURCES.values() for name in ALARM.findall(text)}
    assert len(told) > 10
    assert sorted(name for name in told if f"`{name}`" not in OPERATING) == []


def test_every_warning_of_the_log_is_in_a_page() -> None:
    told = {name for text in SOURCES.values() for name in LINE.findall(text)}
    assert len(told) > 60
    assert told > IN_VLLMS_LOG
    assert sorted(name for name in told - IN_VLLMS_LOG if not any(f"`{name}`" in text for text in PAGES.values())) == []


def test_the_proxy_accepts_bodies_as_large_as_the_gateway_does() -> None:
    longest = EdgeSettings().body_bytes(1 << 20)
    assert f"with a context of 1M tokens {longest >> 20}m" in OPERATING


def test_every_way_to_be_degraded_is_an_alarm() -> None:
    assert [reason for reason in REASONS if f"`{reason}`" not in OPERATING] == []


def test_every_alarm_is_one_that_something_tells() -> None:
    alarms = OPERATING.partition("## Alarms")[2]
    named = {word for line in alarms.splitlines() for word in re.findall(r"`([a-z]+_[a-z_]+)`", line)}
    everything = "".join(SOURCES.values())
    assert sorted(name for name in named if name.removeprefix("mooncake_").removesuffix("_total") not in everything) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    for name in re.findall(r"(?:/opt/mooncake-zmq/|\b)(configs/[a-z-]+\.toml|bin/[a-z-]+)\b(?!/)", PAGES[page]):
        if f"/{name}" in PAGES[page] and f"/opt/mooncake-zmq/{name}" not in PAGES[page]:
            continue  # of somebody else's folder
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("command", sorted({command for text in PAGES.values() for command in COMMAND.findall(text)}))
def test_every_command_of_the_program_is_there(command: str) -> None:
    assert CliRunner().invoke(main, [*command.split(), "--help"]).exit_code == 0


NOT_IN_SCHEMAS = {
    "not": {"not": {}},
    "if": {"if": {}},
    "then": {"then": {}},
    "else": {"else": {}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {}},
    "minContains": {"type": "array", "minContains": 1},
    "maxContains": {"type": "array", "maxContains": 1},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$ref": {"$ref": "https://example.org/schema"},
    "minProperties": {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    "maxProperties": {"type": "object", "properties": {"a": {}}, "maxProperties": 1},
    "format": {"type": "string", "format": "json-pointer"},
    "pattern": {"type": "string", "pattern": "(?!a)b"},
    "\\b": {"type": "string", "pattern": r"\bb"},
}
"""What stands in the page of the API, each in a schema that is refused for it."""


def test_what_a_schema_may_not_say_is_told_and_refused() -> None:
    compiler = Compiler(byte_tokenizer, byte_tokenizer().vocab_size)
    told = re.search(r"\*\*What a schema may not say\*\*(.*?)Words that", PAGES[DOCS / "api.md"], re.DOTALL)
    assert told
    before, _, rest = told[1].partition(" other than ")
    formats, _, after = rest.partition(";")
    assert set(QUOTED.findall(before + after)) == {*NOT_IN_SCHEMAS, "properties", "guided_regex"}
    for name in QUOTED.findall(formats):
        compiler.matcher(of_schema({"type": "string", "format": name})).allowed()
    taken = []
    for name, schema in NOT_IN_SCHEMAS.items():
        with contextlib.suppress(ConstraintError):
            compiler.matcher(of_schema(schema)).allowed()
            taken.append(name)
    assert taken == []
