"""Reads the one TOML file of a deployment into nested frozen dataclasses; every error names the file and the path in it.

Precedence: command line, environment (`MOONCAKE_ZMQ_SECTION__KEY`), file, the profile of the costs, default. Unknown keys are
errors.
"""

import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec
from msgspec import structs

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.hints import did_you_mean, kind_at, record_of, size, wanted, with_sizes, words
from mooncake_zmq.config.records import Config, NodeSettings, OneOfModels
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.core.holding import Holding, longest_request
from mooncake_zmq.core.profile import Profile, ProfileError, decode, fit

ENVIRONMENT_PREFIX = "MOONCAKE_ZMQ_"
FOREIGN_POOL_BYTES = 1 << 20
"""The default of `cache_node.pool_bytes` where our own engine does not compute: its blocks, of which there are none."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config, and the source of each value that is not the default, by dotted path."""

    path: str
    config: Config
    sources: Mapping[str, str]
    raw: Mapping[str, Any]
    models: Mapping[str, "Loaded"] = field(default_factory=dict)
    """For each of several models the deployment without the nodes of the others, which is one of a single model."""

    def of(self, node: NodeSettings) -> "Loaded":
        """Return the deployment as a node of one model has it, in which that is the only one."""
        return self.models[node.model] if node.model else self

    @property
    def of_each(self) -> tuple["Loaded", ...]:
        """The deployment of each model, each of a single model."""
        return tuple(self.models.values()) or (self,)

    def section(self, node: NodeSettings) -> Any:
        """Return the section of `node`'s role, with the node's own `settings` applied."""
        name = node.role.replace("-", "_")
        if not node.settings:
            return getattr(self.config, name)
        kind = get_type_hints(Config)[name]
        where = f"nodes[{self.config.nodes.index(node)}].settings"
        _check_keys(node.settings, kind, self.path, f"{where}.")
        merged = _merge(self.raw.get(name, {}), node.settings)
        return _convert(merged, kind, self.path, self.sources, under=where)

    def check_addresses(self) -> None:
        """Raise ConfigError if HTTP or metrics of a host have one address twice, unless gateways share it, or if a vLLM would
        listen where a node does."""
        taken: dict[tuple[str, str, int], tuple[str, bool]] = {}
        for node in self.config.nodes:
            for at, port, shares in self._http(node):
                address = (node.host, at, port)
                other, other_shares = taken.get(address, ("", True))
                if other and not (shares and other_shares):
                    raise ConfigError(
                        f"{self.path}: {other} and {node.name} listen on {at}:{port} of {node.host}: give them ports of their "
                        "own, or share a gateway's by gateway.reuse_port = true"
                    )
                taken[address] = node.name, shares
        own = {where: node.name for node in self.config.nodes for where in self.config.listens(node)}
        for node in self.config.of_role("vllm"):
            if (events := self.section(node).kv_events) in own:
                raise ConfigError(f"{self.path}: {node.name}: its vLLM would publish at {events}, where {own[events]} listens")

    def check_decodes(self) -> None:
        """Raise ConfigError if there are decodes and all of them only lend."""
        sections = [self.section(node) for node in self.config.of_role("decode")]
        if sections and not any(each.max_batch for each in sections):
            raise ConfigError(f"{self.path}: all decodes have max_batch = 0, so that none takes requests: give one a batch")

    def _http(self, node: NodeSettings) -> Iterator[tuple[str, int, bool]]:
        """Yield where a node serves HTTP, and whether others may listen there too."""
        if node.role == "gateway":
            section = self.section(node)
            yield section.http_host, section.http_port, section.reuse_port
        if node.metrics_port:
            yield node.metrics_host, node.metrics_port, False

    def longest_request(self, max_model_len: int, block_tokens: int) -> int:
        """Return the most tokens of prompt and output together: the model's limit, or what decodes and vLLMs hold."""
        decodes = [self.section(node) for node in self.config.of_role("decode")]
        vllms = [self.section(node) for node in self.config.of_role("vllm")]
        holdings = [Holding(each.capacity_tokens, each.lend_tokens, bool(each.max_batch), each.borrow) for each in decodes]
        holdings += [Holding(each.capacity_tokens, 0, each.part != "prefill", borrows=False) for each in vllms]
        held = any(each.takes for each in holdings)
        return min(max_model_len, longest_request(holdings, block_tokens)) if held else max_model_len

    @property
    def lends(self) -> bool:
        """Whether some decode may borrow KV of another."""
        sections = [self.section(node.in_role("decode")) for node in self.config.nodes if "decode" in node.roles]
        return any(one.borrow and other.lend_tokens for one, other in permutations(sections, 2))


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Loaded:
    """Read `path`, apply the environment and the command line (`overrides`, by dotted path), and check all of it. Raises
    ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    return load_text(text, str(path), overrides, environment)


def load_text(
    text: str, shown: str, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Loaded:
    """Check a deployment as `load` does, from the text of its file. `shown`: what errors name in place of a path."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: not TOML: {error}") from None
    _check_keys(raw, Config, shown, "")
    sources = {key: "file" for key in _paths(raw)}
    environment = os.environ if environment is None else environment
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and "__" in variable:
            dotted = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _override(raw, sources, dotted, environment[variable], f"environment {variable}")
    for dotted, value in (overrides or {}).items():
        _override(raw, sources, dotted, value, "command line")
    if _computes_elsewhere(raw):
        raw = _merge({"cache_node": {"pool_bytes": FOREIGN_POOL_BYTES}}, raw)
    raw = _with_common(raw, shown, sources)
    loaded = _loaded(raw, shown, sources)
    models = {name: _loaded(_with_one(loaded, name), f"{shown}: models.{name}", {**sources}) for name in loaded.config.models}
    return replace(loaded, models=models)


def _with_common(raw: dict[str, Any], shown: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the raw deployment in which each of several models has what it leaves out from [model]. Raises ConfigError."""
    common, models = raw.get("model", {}), raw.get("models")
    if not (isinstance(common, Mapping) and isinstance(models, Mapping)):
        return raw  # a value of another type is refused by the conversion
    for name, own in models.items():
        if not isinstance(own, Mapping):
            raise ConfigError(f"{shown}: models.{name}: a table is wanted: [models.{name}]")
        _convert(
            _merge(common, own), OneOfModels, shown, sources, under=f"models.{name}"
        )  # an error in all of them names no table
    return {**raw, "models": {name: _merge(common, own) for name, own in models.items()}}


def _with_one(loaded: Loaded, name: str) -> dict[str, Any]:
    """Return the raw deployment in which one of several models is the only one."""
    raw = loaded.raw
    model = {**raw["models"][name]}
    own_costs = model.pop("costs", {})
    _check_keys(own_costs, Costs, loaded.path, f"models.{name}.costs.")
    costs = own_costs if "profile" in own_costs else _merge(raw.get("costs", {}), own_costs)
    nodes = [
        {key: value for key, value in node.items() if key != "model"}
        for node in raw["nodes"]
        if node.get("model", "") in ("", name)
    ]
    return {**raw, "model": model, "models": {}, "costs": costs, "nodes": nodes}


def _loaded(raw: dict[str, Any], shown: str, sources: dict[str, str]) -> Loaded:
    """Convert and check a raw deployment. Raises ConfigError."""
    profiled = _profiled(raw.get("costs"), shown, "costs.profile")
    sources |= {f"costs.{key}": f"profile {raw['costs']['profile']}" for key in profiled}
    every_cost = asdict(Costs()) | profiled  # msgspec finds no defaults in a compiled class
    config: Config = _convert(_merge({"costs": every_cost}, raw), Config, shown, sources)
    loaded = Loaded(shown, config, sources, raw)
    for position, node in enumerate(config.nodes):
        if node.modelled:
            costs_of(node.modelled, f"{shown}: nodes[{position}].backend")
        section = loaded.section(node)
        try:
            replace(config, **{node.role.replace("-", "_"): section})  # all checks must hold with its own settings too
        except ValueError as error:
            raise ConfigError(f"{shown}: nodes[{position}].settings: {error}") from None
    loaded.check_addresses()
    loaded.check_decodes()
    return loaded


def effective(loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    """Yield every setting as (dotted path, value, source)."""

    def walk(record: Any, under: str) -> Iterator[tuple[str, Any, str]]:
        for known in fields(record):
            value, dotted = getattr(record, known.name), f"{under}{known.name}"
            if is_dataclass(value):
                yield from walk(value, f"{dotted}.")
            elif dotted == "models":
                for name, model in value.items():
                    yield from walk(model, f"models.{name}.")
            elif dotted == "nodes":
                for position, node in enumerate(value):
                    yield from walk(node, f"nodes[{position}].")
            else:
                common = f"model.{known.name}" if under.startswith("models.") else dotted
                yield dotted, value, loaded.sources.get(dotted, loaded.sources.get(common, "default"))

    yield from walk(loaded.config, "")


def read_profile(path: str) -> Profile:
    """Read a profile from a file. Raises ProfileError."""
    try:
        return decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ProfileError(error.strerror or str(error)) from None


def costs_of(profile: str, where: str) -> Costs:
    """Return the costs of a profile: a file, or the name of known hardware. Raises ConfigError."""
    return Costs(**_costs_from(profile, where))


def _costs_from(path: str, where: str) -> dict[str, Any]:
    if path in HARDWARE:
        found = asdict(HARDWARE[path]) | {"profile": path}
        del found["kv_bytes_per_token"]  # it belongs to the deployment's model, not to the one measured there
        return found
    try:
        profile = read_profile(path)
        return structs.asdict(fit(profile)) | {"profiled_model": profile.fingerprint}
    except ProfileError as error:
        raise ConfigError(f"{where}: {path}: {error}") from None


def _profiled(costs: Any, shown: str, where: str) -> dict[str, Any]:
    """Return the costs from the profile that the costs section names, for costs that the section leaves out."""
    path = costs.get("profile") if isinstance(costs, Mapping) else None
    if not path or not isinstance(path, str):
        return {}  # a value of another type is refused by the conversion
    return {key: value for key, value in _costs_from(path, f"{shown}: {where}").items() if key not in costs}


def _computes_elsewhere(raw: Mapping[str, Any]) -> bool:
    """Return whether no node computes with our own engine, so that all KV is values in the stores."""
    model = raw.get("model")
    return isinstance(model, Mapping) and model.get("engine") in ("vllm", "none")


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        merged[key] = _merge(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return merged


def _check_keys(raw: Mapping[str, Any], kind: type[Any], shown: str, under: str) -> None:
    """Raise ConfigError for a key that `kind` does not have. Values of the wrong type are left to the conversion."""
    hints = get_type_hints(kind)
    for key, value in raw.items():
        path = f"{under}{key}"
        if key not in hints:
            known = ", ".join(sorted(hints))
            raise ConfigError(f"{shown}: {path}: unknown key{did_you_mean(key, hints)}; known here: {known}")
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            _check_keys(value, hints[key], shown, f"{path}.")
        elif isinstance(value, list) and not is_dataclass(hints[key]) and (each := record_of(hints[key])) is not None:
            for position, record in enumerate(value):
                if isinstance(record, Mapping):
                    _check_keys(record, each, shown, f"{path}[{position}].")
        elif isinstance(value, Mapping) and (each := _record_by_name(hints[key])) is not None:
            for name, record in value.items():
                if isinstance(record, Mapping):
                    _check_keys(record, each, shown, f"{path}.{name}.")


def _record_by_name(kind: Any) -> type[Any] | None:
    """Return the record class of tables with free names, if a setting of this type is those."""
    return record_of(kind) if get_origin(kind) is dict else None


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
        known_sections = get_type_hints(kind) if is_dataclass(kind) else {}
        if (named := _record_by_name(kind)) is not None:
            known_sections = {section: named}
        if section not in known_sections:
            raise ConfigError(f"{source}: there is no setting {dotted}{did_you_mean(section, known_sections)}")
        kind = known_sections[section]
        below = inner.get(section)
        # Tables on the path are copied: the caller's stay as they were read.
        inner[section] = inner = dict(below) if isinstance(below, Mapping) else {}
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    if key not in hints or is_dataclass(hints[key]) or dotted == "nodes":
        raise ConfigError(f"{source}: there is no setting {dotted}{did_you_mean(key, hints)}")
    known = words(hints[key])
    if isinstance(value, str) and hints[key] is not str and value not in known and size(value) is None:
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            if known:
                raise ConfigError(f"{source}: {dotted}: {value!r} is none of {', '.join(known)}") from None
            raise ConfigError(f"{source}: {dotted}: cannot read {value!r}; {wanted(key, hints[key])} is wanted") from None
    inner[key] = value
    sources[dotted] = source


def _nan_in(raw: Any) -> str:
    """Return where a value is not a number, as a path that begins with a dot or a bracket; empty: nowhere."""
    if isinstance(raw, float):
        return "." if math.isnan(raw) else ""
    each = raw.items() if isinstance(raw, Mapping) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in each:
        if at := _nan_in(value):
            return (f"[{key}]" if isinstance(key, int) else f".{key}") + at.rstrip(".")
    return ""


def _convert(raw: Mapping[str, Any], kind: type[Any], shown: str, sources: Mapping[str, str], under: str = "") -> Any:
    if at := _nan_in(raw):
        raise ConfigError(f"{shown}: {(under + at).lstrip('.')}: a number is wanted, and nan is none")
    try:
        return msgspec.convert(with_sizes(raw, kind), kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
        path = (under + at.rstrip("`")).lstrip(".")
        source = sources.get(path, "file")
        where = shown if source == "file" else source
        what = what.replace("`", "")
        what = what[0].lower() + what[1:] if what.startswith(("Expected", "Object", "Invalid")) else what
        if what.startswith("invalid enum value") and (known := words(kind_at(kind, at.rstrip("`")))):
            what += f"; it is one of {', '.join(known)}"
        raise ConfigError(f"{where}: {path}: {what}" if path else f"{where}: {what}") from None
