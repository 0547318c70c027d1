"""`mooncake-zmq keys`: makes, lists and rotates the keys of a cluster's nodes and clients."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import click

from mooncake_zmq.core.keys import KeysError, Kind
from mooncake_zmq.core.messages import MAX_PRIORITY
from mooncake_zmq.gateway.http.api_keys import read_with_text
from mooncake_zmq.gateway.requests.tenants import HANGUPS, SHARE, Role, SloRight, Tenant, TenantsError, digest_of, parse
from mooncake_zmq.refused import Refused
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.own_files import replace_own

T = TypeVar("T")

directory_option = click.option(
    "--in", "directory", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Where the keys are."
)


SALT_BYTES = 8


@click.group()
def keys() -> None:
    """Make, list and rotate the keys by which nodes and clients authenticate over TCP.

    Keys are made in one place. Copy `public_keys` to every host, and NAME.secret to the host of NAME only; the setting
    security.keys names the directory there, or a unit's credentials contain both.

    \b
    Examples:
      mooncake-zmq keys make --config cluster.toml --to keys
      mooncake-zmq keys list --in keys
      mooncake-zmq keys rotate prefill-a --in keys
      mooncake-zmq keys api alice --in api_keys --requests 60 --tokens 100000 --share 0.25
    """


@keys.command()
@click.option("--config", "path", metavar="FILE", help="The deployment's TOML file: a key for each of its nodes.")
@click.option("--to", "directory", required=True, metavar="DIR", type=click.Path(path_type=Path))
@click.option("--store", "stores", multiple=True, metavar="NAME", help="A key for a client of stores.")
@click.option(
    "--events",
    multiple=True,
    metavar="NAME",
    help="A key for a subscriber of KV events: with it one can read the token ids of all tenants' prompts.",
)
def make(path: str | None, directory: Path, stores: tuple[str, ...], events: tuple[str, ...]) -> None:
    """Make a key for each node of FILE and each named client that has none yet; existing keys stay.

    \b
    Examples:
      mooncake-zmq keys make --config cluster.toml --to keys
      mooncake-zmq keys make --to keys --store vllm-1 --events dashboard
    """
    wanted: dict[str, tuple[Kind, ...]] = dict.fromkeys(_nodes(path) if path else (), ("node",))
    for name in dict.fromkeys((*stores, *events)):
        if name in wanted:
            _fail(f"{name} is a node: give its client another name")
        named: dict[Kind, tuple[str, ...]] = {"store": stores, "events": events}
        wanted[name] = tuple(kind for kind, names in named.items() if name in names)
    if not wanted:
        _fail("name a deployment with --config, or clients with --store and --events")
    for made in _or_exit(lambda: key_files.make(directory, wanted.items())):
        click.echo(f"{made.name}: {made.fingerprint}, secret in {directory / made.name}.secret")
    click.echo(f"{directory / key_files.PUBLIC_KEYS} is for every host, each secret for the host of its name alone")


@keys.command(name="list")
@directory_option
def list_(directory: Path) -> None:
    """List names, kinds, dates and fingerprints; of two keys of a name the newer one is last.

    \b
    Examples:
      mooncake-zmq keys list --in keys
    """
    for each in _or_exit(lambda: key_files.read_book(directory)).keys:
        click.echo(f"{each.name:<24} {','.join(each.kinds):<14} {each.made}  {each.fingerprint}")


@keys.command()
@click.argument("name", metavar="NAME")
@directory_option
def show(name: str, directory: Path) -> None:
    """Print the public keys of NAME, the newest first: what a subscriber of KV events sets as its `curve_serverkey`.

    \b
    Examples:
      mooncake-zmq keys show cache-a --in keys
    """
    known = _or_exit(lambda: key_files.read_book(directory)).of(name)
    if not known:
        _fail(f"{directory} has no key of {name}")
    for key in known:
        click.echo(key)


@keys.command()
@click.argument("name", metavar="NAME")
@directory_option
def rotate(name: str, directory: Path) -> None:
    """Make a new key for NAME. The former one stays valid until `keys drop NAME`.

    First copy `public_keys` to every host, where running nodes read it again; then the secret to NAME's, and restart NAME.

    \b
    Examples:
      mooncake-zmq keys rotate prefill-a --in keys
    """
    made = _or_exit(lambda: key_files.rotate(directory, name))
    click.echo(f"{name}: {made.fingerprint}, secret in {directory / name}.secret; the former key is good until it is dropped")


@keys.command()
@click.argument("name", metavar="NAME")
@directory_option
def drop(name: str, directory: Path) -> None:
    """Remove the former key of NAME, once it runs with the new one. Connections by the removed key are closed.

    \b
    Examples:
      mooncake-zmq keys drop prefill-a --in keys
    """
    dropped = _or_exit(lambda: key_files.drop(directory, name))
    done = f"{dropped} dropped; copy public_keys to every host" if dropped else "it has one key, which stays"
    click.echo(f"{name}: {done}")


@keys.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--in", "path", required=True, metavar="FILE", type=click.Path(path_type=Path), help="What gateway.api_keys names."
)
@click.option("--requests", type=click.IntRange(0), default=0, help="Calls a minute; 0: any number.")
@click.option("--tokens", type=click.IntRange(0), default=0, help="Tokens a minute, of prompts and answers; 0: any number.")
@click.option(
    "--hangups",
    type=click.IntRange(0),
    default=HANGUPS,
    show_default=True,
    help="Calls a second that its clients may abandon before their end; 0: any number.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=SHARE,
    show_default=True,
    help="Its share of the gateway's slots: 1 where it is the only tenant.",
)
@click.option("--role", type=click.Choice(get_args(Role)), default="user", help="user: calls; metrics: only state; admin: all.")
@click.option(
    "--priority",
    type=click.IntRange(-MAX_PRIORITY, 0),
    default=0,
    help="The least, that is the most urgent, priority that its requests may name.",
)
@click.option("--slo", type=click.Choice(["own"]), help="Allow its requests to name their own SLOs.")
@click.option("--replace", is_flag=True, help="Instead of the key and limits that NAME has. Its cached prefixes stay its own.")
@click.option(
    "--forget",
    is_flag=True,
    help="With --replace: for a new holder of NAME, with whom the former one's cached prefixes are not shared.",
)
def api(name: str, path: Path, slo: SloRight | None, replace: bool, forget: bool, **limits: Any) -> None:
    """Make an API key of NAME for a gateway's clients, print it once, and write its hash to FILE.

    Gateways that run with `gateway.api_keys = FILE` follow the file; a key deleted from it is refused.

    \b
    Examples:
      mooncake-zmq keys api alice --in api_keys --requests 60 --tokens 100000 --share 0.25
      mooncake-zmq keys api grafana --in api_keys --role metrics
      mooncake-zmq keys api alice --in api_keys --replace
      mooncake-zmq keys api team-a --in api_keys --replace --forget
    """
    if forget and not replace:
        _fail("--forget goes with --replace: a new name shares nothing with anybody")
    secret = f"mz-{secrets.token_urlsafe(32)}"

    def tenant(former: Tenant | None) -> Tenant:
        if former is not None and not replace:
            _fail(f"{name} has a key in {path}: --replace makes another one in its place")
        salt = former.own_salt if former is not None and not forget else secrets.token_hex(SALT_BYTES)
        return Tenant(name=name, digest=digest_of(secret), slo=slo or "", own_salt=salt, **limits)

    _or_exit(lambda: _put_tenant(path, name, tenant))
    click.echo(secret)


def _put_tenant(path: Path, name: str, make: Callable[[Tenant | None], Tenant]) -> None:
    """Replace the line of a tenant in a file of API keys, or add one; `make` gets the former tenant. Two of these at once would
    undo each other's change. Raises OSError, KeysError and TenantsError; the file is then as it was."""
    if not path.parent.is_dir():
        _fail(f"there is no directory {path.parent}")
    with key_files.alone(path.parent):
        former, known = read_with_text(path) if path.exists() else ("", ())
        kept = [line for line in former.splitlines() if line.startswith("#") or line.strip().partition(":")[0] != name]
        made = make(next((each for each in known if each.name == name), None))
        text = "".join(f"{line}\n" for line in (*kept, made.line()))
        parse(text)
        # Hashes of keys that cannot be guessed, for gateways of any user.
        replace_own(path, text.encode(), mode=key_files.WORLD_READABLE)


def _nodes(path: str) -> list[str]:
    from mooncake_zmq.config.load import load

    return [node.name for node in load(path).config.nodes]


def _or_exit(action: Callable[[], T]) -> T:
    try:
        return action()
    except (KeysError, TenantsError) as error:
        _fail(str(error))
    except OSError as error:
        directory = Path(error.filename or ".").parent
        is_lacking = isinstance(error, FileNotFoundError) and not directory.is_dir()
        _fail(f"there is no directory {directory}" if is_lacking else f"{error.filename}: {error.strerror}")


def _fail(message: Any) -> NoReturn:
    raise Refused(str(message))
