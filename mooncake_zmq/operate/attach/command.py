"""`mooncake-zmq attach`: asks running vLLM servers, writes a deployment over them, and starts it as `up` does."""

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from mooncake_zmq.config.load import load_text
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.operate.attach import place
from mooncake_zmq.operate.attach.deployment import AttachedModel, Deployment, by_model, write
from mooncake_zmq.operate.attach.lacks import Lack, flags, lacks, line, pasted
from mooncake_zmq.operate.attach.model_files import find
from mooncake_zmq.operate.attach.server import ASK_S, Server, ask
from mooncake_zmq.operate.options import load_config, overrides_of, refuse_aside, set_option
from mooncake_zmq.refused import Refused
from mooncake_zmq.runtime.mistakes import MISTAKES, ServerError
from mooncake_zmq.runtime.process import BAD_INPUT
from mooncake_zmq.runtime.vllm_server import client_of, unwell
from mooncake_zmq.vllm_node.settings import VllmSettings

FILE = "mooncake_zmq/attach.toml"
SHM_DIR = "/dev/shm"
MOST_SERVERS = 64
POLL_S = 0.5
SAY_EVERY_S = 15.0
DEGRADED = 1


def default_file() -> Path:
    """Return where the deployment is written: in the user's data directory, which stays after a reboot."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local/share") / FILE


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--to", "file", metavar="FILE", help="Where the deployment is written.  [default: in the user's data directory]")
@click.option(
    "--model",
    "directories",
    multiple=True,
    metavar="[NAME=]DIR",
    help="The directory with the model's tokenizer, or its name in the Hugging Face cache; with NAME= for one of several.",
)
@set_option
@click.option("--wait", default=600.0, show_default=True, metavar="SECONDS", help="How long to wait for servers that start.")
@click.option("--flags", "only_flags", is_flag=True, help="Print the flags that a vLLM at the first URL needs; ask nothing.")
@click.option("--dry-run", is_flag=True, help="Print the deployment and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as one JSON object and start nothing.")
def attach(
    urls: tuple[str, ...],
    file: str | None,
    directories: tuple[str, ...],
    assignments: tuple[str, ...],
    wait: float,
    *,
    only_flags: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve through the vLLM servers at these URLs: one address, requests routed by KV, answers that outlive their vLLM.

    Each server is asked for its model, sizes and flags, with a prompt of one block. Then a conductor for each model, a gateway,
    a node for each server and a cache-node with a store run here until Ctrl-C; the servers stay as they are. Clients name the
    model if there are several. What a server lacks is printed in one line with the flags to add.
    The exit status is 0 if all is well, 2 if a server or a required flag is missing; with --json and --dry-run 1 if only an
    optional flag is.

    \b
    Examples:
      mooncake-zmq attach http://127.0.0.1:8001 http://127.0.0.1:8002
      mooncake-zmq attach http://a:8000 http://b:8000 --model qwen=~/models/qwen --model llama=~/models/llama
      mooncake-zmq attach http://127.0.0.1:8001 --json
      vllm serve MODEL --port 8001 $(mooncake-zmq attach --flags http://127.0.0.1:8001)
    """
    limit_blas()
    try:
        places = _checked(urls)
        if only_flags:
            _print_flags(places)
            return
        _await(places, wait)
        servers = _ask_all(places)
        found = _lacks(servers)
        for server, lack in zip(servers, found, strict=True):
            if lack:
                click.echo(line(server, lack), err=True)
        needed = any(each.needed for lack in found for each in lack)
        if as_json:
            summary = _as_json(servers, found, directories)
            click.echo(json.dumps(summary, indent=1))
            problem = summary["problem"] or any(each["problem"] for each in summary["models"])
            sys.exit(BAD_INPUT if needed or problem else DEGRADED if any(found) else 0)
        if needed:
            raise Refused("a required flag is missing: start that server with it, and attach again")
        deployment = _deployment(servers, directories)
        if dry_run:
            refuse_aside(assignments)
            click.echo(deployment.toml(), nl=False)
            sys.exit(DEGRADED if any(found) else 0)
        sys.exit(_run(Path(file).expanduser() if file else default_file(), deployment, assignments))
    except MISTAKES as mistake:
        raise Refused(str(mistake)) from None


def _checked(urls: Sequence[str]) -> list[str]:
    """Return the URLs without a slash or `/v1` at their ends. Raises ServerError."""
    places = [url.rstrip("/").removesuffix("/v1") for url in urls]
    if len(places) > MOST_SERVERS:
        raise ServerError(f"{len(places)} servers are too many: at most {MOST_SERVERS}")
    for each in places:
        try:
            VllmSettings(url=each)
        except ValueError as error:
            raise ServerError(str(error)) from None
        if places.count(each) > 1:
            raise ServerError(f"{each} is given twice")
    return places


def _print_flags(urls: Sequence[str]) -> None:
    events = place.published_at(place.events_endpoint(urls[0]))
    click.echo(_as_words(flags(events, _address(place.conventional_store(urls)))))


def _as_words(arguments: Sequence[str]) -> str:
    """Return arguments for the command line: quoted for a person, as they are for `$(...)`, which does not remove quotes."""
    return shlex.join(arguments) if sys.stdout.isatty() else " ".join(arguments)


def _await(urls: Sequence[str], wait_s: float) -> None:
    """Return once every server serves. Raises ServerError after `wait_s` seconds, within which a vLLM that is loading its model
    refuses connections just as a port does that no program listens at."""
    began = time.monotonic()
    say_at = began
    for url in urls:
        with client_of(url, ASK_S) as client:
            while (why := unwell(client)) is not None:
                now = time.monotonic()
                if now >= began + wait_s:
                    raise ServerError(f"{url} does not serve after {now - began:.0f} s: {why}")
                if now >= say_at:
                    left = f"for {began + wait_s - now:.0f} s more at most; Ctrl-C or --wait gives up earlier"
                    click.echo(f"waiting for {url}, {left}: {why}", err=True)
                    say_at = now + SAY_EVERY_S
                time.sleep(POLL_S)


def _ask_all(urls: Sequence[str]) -> tuple[Server, ...]:
    """Return what the servers are, in their order; they are asked at the same time. Raises ServerError."""
    with ThreadPoolExecutor(len(urls)) as threads:
        return tuple(threads.map(lambda url: ask(url, place.events_endpoints(url)), urls))


def _lacks(servers: Sequence[Server]) -> list[list[Lack]]:
    urls = [server.url for server in servers]
    store = _address(_store(servers) or place.conventional_store(urls))
    events = [place.published_at(place.events_endpoint(url)) for url in urls]
    beside = {server.url: of_model for _, of_model in by_model(servers) for server in of_model}
    return [lacks(server, beside[server.url], at, store) for server, at in zip(servers, events, strict=True)]


def _store(servers: Sequence[Server]) -> str:
    """Return the endpoint of this machine's store: the one that connectors name; empty if they name only other machines'."""
    named = [endpoint for server in servers for endpoint in server.stores]
    return place.own_store(named) if named else place.conventional_store([server.url for server in servers])


def _address(store: str) -> str:
    """Return a store's endpoint as a connector's setting."""
    return store.removeprefix("tcp://")


def _deployment(servers: tuple[Server, ...], directories: Sequence[str]) -> Deployment:
    groups = by_model(servers)
    store = _store(servers)
    if not store:
        named = ", ".join(sorted({endpoint for server in servers for endpoint in server.stores}))
        click.echo(f"no store is started here: the servers' connectors use {named}", err=True)
    given = _given(directories, [name for name, _ in groups])
    models = [
        AttachedModel(servers=of_model, name=name, directory=find(of_model, name, given.get(name))) for name, of_model in groups
    ]
    for model in models:
        for server in model.servers:
            if lacking := [adapter for adapter in model.adapters if adapter not in server.adapters]:
                click.echo(f"{server.url} gets no requests for what it does not list: {', '.join(lacking)}", err=True)
    return Deployment(
        models=tuple(models),
        gateway_port=place.gateway_port([server.url for server in servers]),
        store=store,
        store_bytes=place.store_bytes(SHM_DIR),
    )


def _given(directories: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the directories that were given by --model, by the name of the model. Raises ServerError."""
    found: dict[str, str] = {}
    if len(names) == 1 and len(directories) == 1:
        found[names[0]] = directories[0].removeprefix(f"{names[0]}=")
        return found
    for each in directories:
        name = next((name for name in names if each.startswith(f"{name}=")), None)
        if name is None or name in found:
            raise ServerError(
                f"--model {each}: the servers have several models, so give each NAME=DIR once: {', '.join(names)}"
            )
        found[name] = each.removeprefix(f"{name}=")
    return found


def _as_json(servers: Sequence[Server], found: Sequence[Sequence[Lack]], directories: Sequence[str]) -> dict[str, Any]:
    """Return what was found; `problem` says why a model's directory is not known, or why --model is refused."""
    groups = by_model(servers)
    problem, given = "", dict[str, str]()
    try:
        given = _given(directories, [name for name, _ in groups])
    except ServerError as error:
        problem = str(error)
    return {
        "servers": [
            {**asdict(server), "lacks": [asdict(lack) for lack in lacking], "add": pasted(lacking)}
            for server, lacking in zip(servers, found, strict=True)
        ],
        "models": [_model_as_json(name, of_model, given.get(name)) for name, of_model in groups],
        "problem": problem,
    }


def _model_as_json(name: str, servers: Sequence[Server], given: str | None) -> dict[str, Any]:
    directory, problem = None, ""
    try:
        directory = str(find(servers, name, given))
    except ModelError as error:
        problem = str(error)
    return {"name": name, "servers": [server.url for server in servers], "directory": directory, "problem": problem}


def _run(path: Path, deployment: Deployment, assignments: tuple[str, ...]) -> int:
    """Write the deployment, start it and serve until a signal."""
    from mooncake_zmq.operate.up import Up, check_free

    started = load_text(deployment.toml(), str(path), overrides_of(assignments))
    check_free(started.config.cluster.runtime_dir)  # before the file of one that runs is replaced
    write(path, deployment.toml())
    again = shlex.join(["mooncake-zmq", "status", "--config", str(path), *(f"--set={each}" for each in assignments)])
    click.echo(f"wrote {path}; its state: {again}")
    return Up(load_config(str(path), None, assignments), str(path), None, assignments).run()
