"""One TOML file per deployment, read once into nested frozen dataclasses; every error names the file and the path in it.

Precedence: command line, environment (`MOONCAKE_ZMQ_SECTION__KEY`), file, the profile of the costs, default. Unknown keys are
errors.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import structs

from mooncake_zmq.config.records import Config, ConfigError, NodeSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.core.profile import Profile, ProfileError, decode, fit

ENVIRONMENT_PREFIX = "MOONCAKE_ZMQ_"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config and where each value that is no default came from, by dotted path."""

    path: str
    config: Config
    sources: Mapping[str, str]
    raw: Mapping[str, Any]

    def section(self, node: NodeSettings) -> Any:
        """The section of `node`'s role with its own `settings` laid over it."""
        name = node.role.replace("-", "_")
        if not node.settings:
            return getattr(self.config, name)
        kind = get_type_hints(Config)[name]
        where = f"nodes[{self.config.nodes.index(node)}].settings"
        _check_keys(node.settings, kind, self.path, f"{where}.")
        merged = _merge(self.raw.get(name, {}), node.settings)
        return _convert(merged, kind, self.path, self.sources, under=where)

    def check_addresses(self) -> None:
        """Raise ConfigError where gateways of a host listen at one address and not all of them share it, or a vLLM would where
        a node does."""
        taken: dict[tuple[str, str, int], str] = {}
        for node in self.config.of_role("gateway"):
            section = self.section(node)
            address = (node.host, section.http_host, section.http_port)
            shares = section.reuse_port and self.section(self.config.node(taken.get(address, node.name))).reuse_port
            if address in taken and not shares:
                raise ConfigError(
                    f"{self.path}: {taken[address]} and {node.name} listen on {address[1]}:{address[2]} of {node.host}: give "
                    "them ports of their own, or share it by gateway.reuse_port = true"
                )
            taken[address] = node.name
        own = {where: node.name for node in self.config.nodes for where in self.config.listens(node)}
        for node in self.config.of_role("vllm"):
            if (events := self.section(node).kv_events) in own:
                raise ConfigError(f"{self.path}: {node.name}: its vLLM would publish at {events}, where {own[events]} listens")

    def longest_request(self, max_model_len: int, block_tokens: int) -> int:
        """Tokens of prompt and output together: what the model takes, and the roomiest decode holds in whole blocks."""
        nodes = [self.section(node) for node in self.config.of_role("decode", "vllm")]
        blocks = [each.capacity_tokens // block_tokens for each in nodes if getattr(each, "part", "both") != "prefill"]
        return min(max_model_len, max(blocks) * block_tokens) if blocks else max_model_len


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Loaded:
    """Read `path`, lay environment and command line (`overrides`, by dotted path) over it, check everything."""
    shown = str(path)
    raw = _read(Path(path), shown)
    _check_keys(raw, Config, shown, "")
    sources = {key: "file" for key in _paths(raw)}
    environment = os.environ if environment is None else environment
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and "__" in variable:
            dotted = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _override(raw, sources, dotted, environment[variable], f"environment {variable}")
    for dotted, value in (overrides or {}).items():
        _override(raw, sources, dotted, value, "command line")
    profiled = _profiled(raw.get("costs"), shown, "costs.profile")
    sources |= {f"costs.{key}": f"profile {raw['costs']['profile']}" for key in profiled}
    every_cost = asdict(Costs()) | profiled  # msgspec finds no defaults in a class of machine code
    config: Config = _convert(_merge({"costs": every_cost}, raw), Config, shown, sources)
    loaded = Loaded(shown, config, sources, raw)
    for position, node in enumerate(config.nodes):
        if node.modelled:
            costs_of(node.modelled, f"{shown}: nodes[{position}].backend")
        section = loaded.section(node)
        try:
            replace(config, **{node.role.replace("-", "_"): section})  # what holds for all must hold with its own settings too
        except ValueError as error:
            raise ConfigError(f"{shown}: nodes[{position}].settings: {error}") from None
    loaded.check_addresses()
    return loaded


def effective(loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    """Every setting as (dotted path, value, source)."""

    def walk(record: Any, under: str) -> Iterator[tuple[str, Any, str]]:
        for known in fields(record):
            value, dotted = getattr(record, known.name), f"{under}{known.name}"
            if is_dataclass(value):
                yield from walk(value, f"{dotted}.")
            elif dotted == "nodes":
                for position, node in enumerate(value):
                    yield from walk(node, f"nodes[{position}].")
            else:
                yield dotted, value, loaded.sources.get(dotted, "default")

    yield from walk(loaded.config, "")


def read_profile(path: str) -> Profile:
    """Raises ProfileError."""
    try:
        return decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ProfileError(error.strerror or str(error)) from None


def costs_of(profile: str, where: str) -> Costs:
    """What a profile says that things cost: that in a file, or named hardware. Raises ConfigError."""
    return Costs(**_told(profile, where))


def _told(path: str, where: str) -> dict[str, Any]:
    if path in HARDWARE:
        found = asdict(HARDWARE[path]) | {"profile": path}
        del found["kv_bytes_per_token"]  # the model's here, not the one that was served there
        return found
    try:
        profile = read_profile(path)
        return structs.asdict(fit(profile)) | {"profiled_model": profile.fingerprint}
    except ProfileError as error:
        raise ConfigError(f"{where}: {path}: {error}") from None


def _profiled(costs: Any, shown: str, where: str) -> dict[str, Any]:
    """What the profile that the costs' section names says of the costs that the section leaves open."""
    path = costs.get("profile") if isinstance(costs, Mapping) else None
    if not path or not isinstance(path, str):
        return {}  # a value of another type is refused with the others
    return {key: value for key, value in _told(path, f"{shown}: {where}").items() if key not in costs}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        merged[key] = _merge(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read(path: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: not TOML: {error}") from None


def _check_keys(raw: Mapping[str, Any], kind: type[Any], shown: str, under: str) -> None:
    """Raise on a key that `kind` does not know. Values of the wrong shape are left to the conversion."""
    hints = get_type_hints(kind)
    for key, value in raw.items():
        path = f"{under}{key}"
        if key not in hints:
            near = ", ".join(sorted(hints))
            raise ConfigError(f"{shown}: {path}: unknown key; known here: {near}")
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            _check_keys(value, hints[key], shown, f"{path}.")
        elif (each := _record_of(hints[key])) is not None and isinstance(value, list):
            for position, record in enumerate(value):
                if isinstance(record, Mapping):
                    _check_keys(record, each, shown, f"{path}[{position}].")


def _record_of(kind: Any) -> type[Any] | None:
    """What a list of tables has in it, if `kind` is one."""
    found = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
    return found if isinstance(found, type) and is_dataclass(found) else None


def _paths(raw: Mapping[str, Any], under: str = "") -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{under}{key}.")
        elif key == "nodes" and isinstance(value, list):
            for position, node in enumerate(value):
                if isinstance(node, Mapping):
                    yield from _paths(node, f"nodes[{position}].")
        else:
            yield f"{under}{key}"


def _override(raw: dict[str, Any], sources: dict[str, str], dotted: str, value: Any, source: str) -> None:
    kind: Any = Config
    inner = raw
    *sections, key = dotted.split(".")
    for section in sections:
        kind = get_type_hints(kind).get(section) if is_dataclass(kind) else None
        below = inner.get(section)
        # Copied on the way down: the caller's tables stay as they were read.
        inner[section] = inner = dict(below) if isinstance(below, Mapping) else {}
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    if key not in hints or is_dataclass(hints[key]) or dotted == "nodes":
        raise ConfigError(f"{source}: there is no setting {dotted}")
    words = _words(hints[key])
    if isinstance(value, str) and hints[key] is not str and value not in words:
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            if words:
                raise ConfigError(f"{source}: {dotted}: {value!r} is none of {', '.join(words)}") from None
            raise ConfigError(f"{source}: {dotted}: cannot read {value!r}") from None
    inner[key] = value
    sources[dotted] = source


def _words(kind: Any) -> tuple[str, ...]:
    """The words that a setting of this type may be."""
    if get_origin(kind) is Literal:
        return tuple(each for each in get_args(kind) if isinstance(each, str))
    return tuple(word for part in get_args(kind) for word in _words(part))


def _convert(raw: Mapping[str, Any], kind: type[Any], shown: str, sources: Mapping[str, str], under: str = "") -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
        path = (under + at.rstrip("`")).lstrip(".")
        source = sources.get(path, "file")
        where = shown if source == "file" else source
        what = what.replace("`", "")
        what = what[0].lower() + what[1:] if what.startswith(("Expected", "Object", "Invalid")) else what
        raise ConfigError(f"{where}: {path}: {what}" if path else f"{where}: {what}") from None
