"""Checks access: keys of this machine's nodes, API keys and certificates of its gateways. Secrets are never printed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.config.warnings import exposure_of
from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.operate.doctor.places import units_installed
from mooncake_zmq.transfer import key_files

AREA = "access"


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on each node's own key, then on what each gateway exposes and requires of its clients."""
    directory = key_files.directory_of(here.config.security.keys)
    if directory is not None:
        for node in here.nodes:
            yield node_key(directory, node.name, units_installed())
            yield from tenants_clients(directory, node, here.section(node))
    for node in here.of_role("gateway"):
        for judgement in exposure_of(here.section(node)):
            yield Finding(AREA, judgement.level, f"{node.name}: {judgement.found}", judgement.advice)


def node_key(directory: Path, name: str, units: bool) -> Finding:
    """Check the key pair that authenticates a node to others. `units`: systemd has the project's units, and passes each its
    secret."""
    advice = "`mooncake-zmq keys make` where keys are made, then copy them here"
    try:
        if units and not (directory / f"{name}.secret").exists():
            if key_files.read_book(directory).of(name):
                return Finding(AREA, "ok", f"{name} has a public key; its secret is its unit's credential, or the unit fails")
            return Finding(AREA, "problem", f"{directory / key_files.PUBLIC_KEYS} has no key of {name}", advice)
        known = key_files.load(directory, name)
    except OSError as error:
        return Finding(AREA, "problem", f"{name}: {error.filename}: {error.strerror}", advice)
    except KeysError as error:
        return Finding(AREA, "problem", f"{name}: {error}", advice)
    return Finding(AREA, "ok", f"{name} has its secret key, and {known.path} has {len(known.book.keys)} public ones")


def tenants_clients(directory: Path, node: NodeSettings, section: Any) -> Iterator[Finding]:
    """Yield a finding on tenants of a cache-node's store whose clients have no key."""
    tenants = section.objects.tenants if node.role == "cache-node" and node.store_endpoint else ()
    wanted = {name for tenant in tenants for name in (*tenant.clients, *tenant.readers)}
    try:
        known = {each.name for each in key_files.read_book(directory).keys if "store" in each.kinds}
    except (KeysError, OSError):  # reported already
        return
    if missing := sorted(wanted - known):
        advice = f"mooncake-zmq keys make --to DIR {' '.join(f'--store {name}' for name in missing)}, or correct the names"
        yield Finding(AREA, "warning", f"{node.name}: its store's tenants name clients without a key", advice)
    elif wanted:
        yield Finding(
            AREA, "ok", f"{node.name}: its store has {len(tenants)} tenants, and {len(wanted)} clients of theirs a key"
        )
