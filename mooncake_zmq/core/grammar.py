"""How much there is of a grammar, as gateways and engines count it alike. Whether it is one is not looked at. PURE."""

import msgspec


def links(grammar: str) -> int:
    """At least its rules and references to schemas, of which chains are made. A rule begins a line. Raises ValueError and, if
    it is JSON of great depth, RecursionError."""
    line_end = "\n"
    if grammar.lstrip().startswith("{"):  # where a name may be written in many ways
        grammar, line_end = msgspec.json.encode(msgspec.json.decode(grammar)).decode(), "\\n"
    return sum(":" in line for line in grammar.split(line_end)) + grammar.count("$ref")
