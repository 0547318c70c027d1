"""Grammars as llguidance writes them down: their size, counted alike by gateways and engines, and what they were made of.
Whether a grammar is valid is not checked. PURE."""

from typing import Any

import msgspec


def links(grammar: str) -> int:
    """Return an upper bound of the number of a grammar's rules and references to schemas, which may form chains. A rule begins
    a line. Raises ValueError and, for JSON of great depth, RecursionError."""
    line_end = "\n"
    if grammar.lstrip().startswith("{"):  # where a name may be written in many ways
        grammar, line_end = msgspec.json.encode(msgspec.json.decode(grammar)).decode(), "\\n"
    return sum(":" in line for line in grammar.split(line_end)) + grammar.count("$ref")


def schema_of(grammar: bytes) -> dict[str, Any] | None:
    """Return the schema that a grammar of llguidance's was made of; None: it was made of something else."""
    if not grammar.startswith(b"{"):
        return None
    found: dict[str, Any] | None = _first(grammar).get("json_schema")
    return found


def lark_of(grammar: bytes) -> str:
    """Return the text in Lark's syntax of a grammar that was not made of a schema."""
    return str(_first(grammar)["lark_grammar"]) if grammar.startswith(b"{") else grammar.decode()


def _first(grammar: bytes) -> dict[str, Any]:
    first: dict[str, Any] = msgspec.json.decode(grammar)["grammars"][0]
    return first
