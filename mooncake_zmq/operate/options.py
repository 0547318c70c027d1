"""Options that many commands have, and what they name: a configuration, and the gateways to call."""

from typing import TYPE_CHECKING

import click

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.examples import LOCAL, located

if TYPE_CHECKING:
    from mooncake_zmq.config.load import Loaded
    from mooncake_zmq.operate.console.gateways import Gateways


STORE_PORT = 7301
"""The port of a store, where nothing names another."""


def found(_context: click.Context, _parameter: click.Parameter, path: str) -> str:
    """Return the path of a configuration that may be one of the project's own."""
    return located(path)


config_option = click.option(
    "--config",
    "path",
    default=LOCAL,
    show_default=True,
    metavar="FILE",
    help="The deployment's TOML file.",
    callback=found,
)
set_option = click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Override a setting, e.g. session.heartbeat_s=0.2."
)
url_option = click.option("--url", default="", metavar="URL", help="The gateway to call; by default those of the file.")
ca_option = click.option(
    "--ca", default="", metavar="FILE", help="Trusted certificates, for gateways with TLS certificates of their own."
)


def gateways_of(path: str, assignments: tuple[str, ...], url: str, ca: str) -> "Gateways":
    """Return a client of the gateway at `url`, or of those of the configuration. Raises ConfigError."""
    from mooncake_zmq.operate.console.gateways import Gateways

    return Gateways.at(url, ca=ca) if url else Gateways.of(load_config(path, None, assignments), ca=ca)


def load_config(path: str, model: str | None, assignments: tuple[str, ...]) -> "Loaded":
    """Return the configuration with the values of --set, and of --model if given. Raises ConfigError."""
    from mooncake_zmq.config.load import load

    overrides = overrides_of(assignments)
    if model is not None:
        overrides["model.path"] = model
    loaded = load(path, overrides)
    if model is not None and loaded.config.models:
        names = ", ".join(loaded.config.models)
        raise ConfigError(f"--model: {path} has several models: set one by --set models.NAME.path={model}, of {names}")
    return loaded


def refuse_aside(assignments: tuple[str, ...]) -> None:
    """Refuse --set beside --dry-run, whose output would lack it. Raises UsageError."""
    if assignments:
        raise click.UsageError(
            "--set is not part of the file: leave it out with --dry-run, and give it to the commands that read the file"
        )


def overrides_of(assignments: tuple[str, ...]) -> dict[str, str]:
    """Return the values of --set by dotted path. Raises ConfigError."""
    overrides: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE")
        overrides[key.strip()] = value.strip()
    return overrides
