"""The command line. Each command imports its modules when it runs, so that `--help` is instant and BLAS threads are set before
NumPy loads."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mooncake_zmq.config.examples import LOCAL, VLLM, located
from mooncake_zmq.core.roles import BECOMES, SUMMARIES, Role
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.operate.options import ca_option, config_option, found, gateways_of, load_config, set_option, url_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_zmq.config.records import NodeSettings

file_argument = click.argument("path", metavar="FILE", default=LOCAL, callback=found)
model_option = click.option(
    "--model", metavar="MODEL", help='"default", "toy", "dummy:SHAPE", a GGUF file or a Hugging Face directory.'
)
host_option = click.option("--host", metavar="HOST", help="Only nodes of this host.")


class Cli(click.Group):
    """Shows commands in the order of this file, and every expected error as one line.

    Exit codes: 2 for a command or setting that is wrong or a machine that lacks something, 1 for work that was done and whose
    result is bad.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **extra)
        except click.UsageError as error:
            _fail(_sentence(error), error.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            _fail(_sentence(error), error.exit_code)
        except ModuleNotFoundError as error:
            from mooncake_zmq.extras import advice

            if (lacking := advice(error)) is None:
                raise
            _fail(lacking)


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mooncake-zmq")
def main() -> None:
    """A KVCache-centric, disaggregated LLM server made of plain processes that speak ZeroMQ.

    \b
    Examples:
      mooncake-zmq up                                     a whole cluster on this machine
      mooncake-zmq up --demo                              the same, with questions about a long document
      mooncake-zmq prefill --config configs/local.toml --node prefill-a
      mooncake-zmq config check configs/local.toml
    """


def _role_command(role: Role, summary: str) -> None:
    @main.command(
        role, help=f"{summary}\n\n\b\nExample:\n  mooncake-zmq {role} --config {LOCAL} --node NAME", short_help=summary
    )
    @config_option
    @click.option("--node", required=True, metavar="NAME", help="Which of the file's nodes this process is.")
    @model_option
    @set_option
    def run(path: str, node: str, model: str | None, assignments: tuple[str, ...]) -> None:
        limit_blas()
        mypyc_code.use(mypyc_code.NODES)
        loaded = load_config(path, model, assignments)
        found = loaded.config.node(node)
        if role not in found.roles:
            _fail(f"{path}: {node} is a {found.role}, not a {role}")
        from mooncake_zmq.runtime.process import main as run_process

        def begin_as(other: str) -> None:
            """Run this process in another role. It stays the same process, so its parent need not know. Of its state only
            inherited open files survive this."""
            options = ["--config", path, "--node", node, *(part for each in assignments for part in ("--set", each))]
            options += ["--model", model] if model is not None else []
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-P", "-m", "mooncake_zmq", other, *options])

        sys.exit(run_process(loaded, node, role=role, begin_as=begin_as))


for _role, _summary in SUMMARIES.items():
    _role_command(_role, _summary)


@main.command()
@config_option
@model_option
@set_option
@click.option("--demo", is_flag=True, help="Ask questions about one long document, show what was reused, then stop.")
@click.option("--engine", type=click.Choice(["own", "vllm"]), help="The engine; vllm uses configs/vllm.toml by default.")
@click.option("--vllm-python", metavar="PYTHON", help="Start a vLLM for each vllm node with this Python.")
@click.option("--compile", "compiles", is_flag=True, help="Compile what nodes run, once they serve; the next start uses it.")
def up(
    path: str,
    model: str | None,
    assignments: tuple[str, ...],
    demo: bool,
    engine: str | None,
    vllm_python: str | None,
    compiles: bool,
) -> None:
    """Start every node of FILE on this machine, and stop them with Ctrl-C.

    \b
    Examples:
      mooncake-zmq up
      mooncake-zmq up --model ~/models/llama.gguf
      mooncake-zmq up --set gateway.http_port=8080
      mooncake-zmq up --demo
      mooncake-zmq up --engine vllm --vllm-python ~/vllm/bin/python --model ~/models/Qwen3-8B
    """
    limit_blas()
    if engine == "vllm" and path == located(LOCAL):
        path = located(VLLM)
    if engine is not None:
        assignments = (*assignments, f"model.engine={engine}")
    if vllm_python is not None and engine != "vllm":
        _fail("--vllm-python goes with --engine vllm")
    loaded = load_config(path, model, assignments)
    from mooncake_zmq.operate.up import Up

    cluster = Up(loaded, path, model, assignments, vllm_python=vllm_python, compiles=compiles and not demo)
    if demo:
        from mooncake_zmq.operate.demo import Demo, VllmDemo

        sys.exit(cluster.run(VllmDemo().run if engine == "vllm" else Demo().run))
    sys.exit(cluster.run())


def _forward(name: str, module: str, summary: str) -> None:
    """Add a command that is defined in `module` under the same name, which is imported when it is called."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @main.command(name, help=summary, add_help_option=False, context_settings=settings)
    @click.pass_context
    def forward(context: click.Context) -> None:
        command: click.Command = getattr(importlib.import_module(module), name.replace("-", "_"))
        sys.exit(command.main(context.args, prog_name=f"mooncake-zmq {name}", standalone_mode=False))


_forward("attach", "mooncake_zmq.operate.attach.command", "Serve through vLLM servers that run, with a pool, by their URLs.")
_forward("store", "mooncake_zmq.operate.store", "Serve a store of values to other engines, without a configuration.")
_forward("simtest", "mooncake_zmq.simulation.report", "Run the cluster under virtual time and seeded faults.")
_forward("chaos", "mooncake_zmq.chaos.command", "Break a real cluster by seeded faults; clients check every token.")
_forward("prove", "mooncake_zmq.prove.command", "Compare restored KV with computed KV, for any connector of vLLM.")
_forward("fuzz", "mooncake_zmq.fuzz.command", "Feed unexpected bytes to every decoder of outside input.")
_forward("sim", "mooncake_zmq.laboratory.command", "Replay a trace in virtual time: policies, sizes, SLOs.")
_forward("reproduce", "mooncake_zmq.laboratory.reproduce.command", "Print a figure of the papers beside this project's own.")
_forward("trace-data", "mooncake_zmq.laboratory.trace_data", "Where the public trace is; or what is in a trace.")
_forward("bench", "mooncake_zmq.bench.command", "Measure performance, each value beside its reference.")
_forward("profile", "mooncake_zmq.bench.command", "Measure the engine for the conductor's predictions.")
_forward("restart", "mooncake_zmq.operate.console.restart", "Restart all nodes one after the other, without an error.")
_forward("usage", "mooncake_zmq.operate.usage", "Sum up the tokens that API keys used, by day.")
_forward("answers", "mooncake_zmq.operate.answers", "Predict likely prompts and have a gateway answer them ahead.")
_forward("compile", "mooncake_zmq.native.command", "Compile what every node runs for each message to machine code.")
_forward("keys", "mooncake_zmq.operate.keys", "Make, list and rotate the keys by which nodes and clients authenticate.")


@main.command()
@click.option("--licences", is_flag=True, help="Print one line for each: name, version, licence.")
def sbom(licences: bool) -> None:
    """Print the packages that the installed program consists of, with licences, as CycloneDX JSON.

    \b
    Examples:
      mooncake-zmq sbom > sbom.json
      mooncake-zmq sbom --licences
    """
    from mooncake_zmq.operate.sbom import bill

    found = bill()
    if not licences:
        click.echo(json.dumps(found, indent=1))
        return
    for each in found["components"]:
        known = each["licenses"][0]["license"]["name"] if "licenses" in each else "not said"
        click.echo(f"{each['name']} {each['version']} {known}")


@main.group()
def config() -> None:
    """Check or show a deployment's settings.

    \b
    Examples:
      mooncake-zmq config check cluster.toml
      mooncake-zmq config show cluster.toml --set prefill.chunk_tokens=1024
    """


@config.command()
@file_argument
@model_option
@set_option
def check(path: str, model: str | None, assignments: tuple[str, ...]) -> None:
    """Check FILE and print what it would use: nodes, RAM, cores.

    \b
    Examples:
      mooncake-zmq config check cluster.toml
      mooncake-zmq config check configs/local.toml --model ~/models/llama.gguf
    """
    from mooncake_zmq.config.checks import check_local_reads, check_open
    from mooncake_zmq.config.summary import summary
    from mooncake_zmq.config.warnings import warnings

    loaded = load_config(path, model, assignments)
    check_local_reads(loaded, loaded.config.nodes)
    for line in summary(loaded):
        click.echo(line)
    for warning in warnings(loaded):
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    check_open(loaded, loaded.config.nodes)
    click.echo(f"{path}: ok")


@config.command()
@file_argument
@model_option
@set_option
def show(path: str, model: str | None, assignments: tuple[str, ...]) -> None:
    """Print every effective value of FILE and where it came from.

    \b
    Examples:
      mooncake-zmq config show cluster.toml
      mooncake-zmq config show cluster.toml --set prefill.chunk_tokens=1024
    """
    from mooncake_zmq.config.load import effective

    for dotted, value, source in effective(load_config(path, model, assignments)):
        click.echo(f"{dotted} = {value!r}  ({source})")


@config.command()
@file_argument
@host_option
def units(path: str, host: str | None) -> None:
    """Print the names of FILE's systemd units, one per line.

    \b
    Example:
      systemctl enable --now mooncake.target $(mooncake-zmq config units /etc/mooncake-zmq/cluster.toml --host host-a)
    """
    nodes = load_config(path, None, ()).config.nodes
    _check_host(path, nodes, host)
    for node in (each for each in nodes if host in (None, each.host)):
        click.echo(f"mooncake-{node.role}@{node.name}.service")


@config.command()
@file_argument
@host_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of the table.")
def ports(path: str, host: str | None, as_json: bool) -> None:
    """Print the TCP ports of FILE's nodes and who connects to each, for a firewall.

    \b
    Example:
      mooncake-zmq config ports /etc/mooncake-zmq/cluster.toml --host host-a
    """
    from mooncake_zmq.config.ports import print_ports

    loaded = load_config(path, None, ())
    _check_host(path, loaded.config.nodes, host)
    print_ports(loaded, host, as_json=as_json)


def _check_host(path: str, nodes: "Sequence[NodeSettings]", host: str | None) -> None:
    hosts = sorted({node.host for node in nodes})
    if host is not None and host not in hosts:
        _fail(f"{path}: no node has host {host!r}; hosts are {', '.join(hosts) or 'none'}")


@main.group()
def model() -> None:
    """Inspect a model before running it.

    \b
    Examples:
      mooncake-zmq model inspect ~/models/llama.gguf
      mooncake-zmq model card default > card.json
    """


@model.command()
@click.argument("path", metavar="MODEL")
@click.option("--cache-dir", default="", metavar="DIR", help="Where it would be prepared; by default the user's cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(path: str, cache_dir: str, as_json: bool) -> None:
    """Print what MODEL is, how much memory it needs, and whether it runs here; nothing is converted.

    MODEL is a GGUF file, a Hugging Face directory, a prepared directory, "default", "toy" or "dummy:SHAPE".
    The exit status is 1 if it does not run here.

    \b
    Examples:
      mooncake-zmq model inspect ~/models/llama.gguf
      mooncake-zmq model inspect ~/models/Qwen3-0.6B --json
      mooncake-zmq model inspect default
    """
    from mooncake_zmq.engine.errors import ModelError
    from mooncake_zmq.engine.inspect import inspect as inspect_model
    from mooncake_zmq.engine.inspect_table import print_inspection
    from mooncake_zmq.operate.console.terminal import Terminal

    try:
        found = inspect_model(path, cache_dir)
    except ModelError as error:
        if not as_json:
            _fail(error.message, 1)
        click.echo(json.dumps({"model": path, "runs": False, "problems": [error.message]}, indent=1))
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        print_inspection(found, Terminal())
    sys.exit(0 if found.runs else 1)


@model.command()
@click.argument("path", metavar="MODEL")
@click.option("--cache-dir", default="", metavar="DIR", help="Where it is prepared; by default the user's cache.")
@click.option("--to", "directory", type=click.Path(path_type=Path, file_okay=False), help="Write card and tokenizer to DIR.")
def card(path: str, cache_dir: str, directory: Path | None) -> None:
    """Print MODEL's card, which the setting model.card names on hosts without the model. Prepares the model if necessary.

    A gateway needs the tokenizer as well: --to DIR writes both, a few MB.

    \b
    Examples:
      mooncake-zmq model card ~/models/llama.gguf > card.json
      mooncake-zmq model card default --to /etc/mooncake-zmq/model
    """
    limit_blas()
    from mooncake_zmq.engine import card as cards
    from mooncake_zmq.engine.prepare import prepare

    prepared = prepare(path, cache_dir, backend="auto", kernels=False)  # so that no engine downloads it again
    if directory is None:
        click.echo(cards.encode(cards.of_prepared(prepared)).decode(), nl=False)
    else:
        click.echo(cards.export(prepared, directory))


@main.command()
@config_option
@set_option
@url_option
@ca_option
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as one JSON object.")
def status(path: str, assignments: tuple[str, ...], url: str, ca: str, as_json: bool) -> None:
    """Print the state of the cluster, from the first of its gateways that answers; works on any host.

    The exit status is 0 if all is well, 1 if it serves and something is degraded, 2 if it does not serve or no gateway answers,
    3 if an API key is needed to ask.
    If gateways require API keys, set MOONCAKE_ZMQ_API_KEY to an operator's (role metrics or admin).

    \b
    Examples:
      mooncake-zmq status
      mooncake-zmq status --url https://llm.example.org --json
    """
    from mooncake_zmq.operate.console.status import show
    from mooncake_zmq.operate.console.terminal import Terminal

    sys.exit(show(gateways_of(path, assignments, url, ca), Terminal(), as_json=as_json))


@main.command()
@config_option
@set_option
@url_option
@ca_option
def top(path: str, assignments: tuple[str, ...], url: str, ca: str) -> None:
    """Show the cluster's state each second: nodes and their load, KV transfers, hits, refusals, predictions.

    \b
    Example:
      mooncake-zmq top --config /etc/mooncake-zmq/cluster.toml
    """
    from mooncake_zmq.operate.console.status import watch
    from mooncake_zmq.operate.console.terminal import Terminal

    try:
        sys.exit(watch(gateways_of(path, assignments, url, ca), Terminal()))
    except KeyboardInterrupt:
        sys.exit(0)


@main.command()
@click.argument("request", metavar="ID")
@config_option
@set_option
@url_option
@ca_option
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as one JSON object.")
@click.option("--perfetto", metavar="FILE", help="Also write a trace for https://ui.perfetto.dev to FILE.")
def trace(
    request: str, path: str, assignments: tuple[str, ...], url: str, ca: str, as_json: bool, perfetto: str | None
) -> None:
    """Show where the time of a finished request went, attempt by attempt.

    ID is the gateway's (header x-mooncake-request-id of the answer, or "request" in its object "mooncake"), the client's
    x-request-id, or the trace id of its traceparent. Gateways remember only the last requests.

    \b
    Examples:
      mooncake-zmq trace gateway-0-19a3b5c-2f
      mooncake-zmq trace my-own-id --perfetto trace.json
    """
    from mooncake_zmq.operate.console.terminal import Terminal
    from mooncake_zmq.operate.console.trace import show

    sys.exit(show(gateways_of(path, assignments, url, ca), request, Terminal(), as_json, perfetto))


@main.command()
@config_option
@set_option
@url_option
@ca_option
@click.option("--node", metavar="NAME", help="Only this node, on any host; by default all nodes that run on this machine.")
def dump(path: str, assignments: tuple[str, ...], url: str, ca: str, node: str | None) -> None:
    """Print the state of running nodes as JSON.

    The state of a node that does not run on this machine comes from a gateway; with --url always from that one.

    \b
    Examples:
      mooncake-zmq dump
      mooncake-zmq dump --config /etc/mooncake-zmq/cluster.toml --node decode-b
    """
    from urllib.parse import quote

    from mooncake_zmq.operate.console.gateways import NoGateway
    from mooncake_zmq.operate.local_nodes import collect_dumps

    if url and not node:
        _fail("--url calls a gateway, which returns the state of one node: name it by --node")
    names, dumps = [node or ""], {}
    if not url:
        loaded = load_config(path, None, assignments)
        names = [loaded.config.node(node).name] if node else [each.name for each in loaded.config.nodes]
        dumps = collect_dumps(Path(loaded.config.cluster.runtime_dir), names)
    if node and not dumps:
        try:
            dumps[node] = gateways_of(path, assignments, url, ca).ask(f"/cluster/state/{quote(node, safe='')}")[1]
        except NoGateway as error:
            where = "" if url else " does not run on this machine, and"
            click.echo(f"{node}{where or ':'} no gateway knows its state: {error}", err=True)
    click.echo(json.dumps(dumps, indent=1))
    if missing := [name for name in names if name not in dumps]:
        click.echo(f"not running or not answering: {', '.join(missing)}", err=True)
        sys.exit(1)


@main.command()
@click.argument("key", metavar="KEY")
@click.argument("copies", type=click.IntRange(1), metavar="COPIES")
@config_option
@set_option
@click.option("--node", metavar="NAME", help="The conductor to ask; by default the first of the file.")
def replica(key: str, copies: int, path: str, assignments: tuple[str, ...], node: str | None) -> None:
    """Make COPIES hosts hold the prefix whose last block has KEY.

    A conductor's `dump` lists such keys under "recent".

    \b
    Examples:
      mooncake-zmq dump --node conductor-0 | grep -A6 recent
      mooncake-zmq replica 0d3f29c1a4e87b5596d2a80c1be47f33 3
    """
    from mooncake_zmq.core.commands import SetCopies

    _ask_conductor(load_config(path, None, assignments), node, SetCopies(key, copies))


@main.command()
@click.argument("node", metavar="NODE")
@click.argument("role", type=click.Choice(list(BECOMES)), metavar="ROLE")
@config_option
@set_option
@click.option("--conductor", metavar="NAME", help="The conductor to ask; by default the first of the file.")
def role(node: str, role: Role, path: str, assignments: tuple[str, ...], conductor: str | None) -> None:
    """Make NODE, a prefill or decode whose settings allow it, become a ROLE: prefill or decode.

    It finishes its requests and accepts no new ones; then its process restarts in the other role. This command does not wait
    for that: `dump` and a gateway's /health show when it is done.

    \b
    Examples:
      mooncake-zmq role prefill-b decode
      mooncake-zmq role prefill-b prefill
    """
    from mooncake_zmq.core.commands import SetRole

    loaded = load_config(path, None, assignments)
    if (configured := loaded.config.node(node).role) not in BECOMES:
        _fail(f"{node} is a {configured}: only a prefill or a decode changes its role")
    _ask_conductor(loaded, conductor, SetRole(node, role))


@main.command()
@click.argument("node", metavar="NODE")
@config_option
@set_option
@url_option
@ca_option
@click.option("--undo", is_flag=True, help="Make it serve again.")
@click.option("--wait", default=300.0, show_default=True, metavar="SECONDS", help="How long to wait until it is drained.")
def drain(node: str, path: str, assignments: tuple[str, ...], url: str, ca: str, undo: bool, wait: float) -> None:
    """Make NODE, of any role and on any host, accept nothing new and finish what it has.

    Its process keeps running, so this can be undone; after a restart it serves. A drained gateway answers calls with 503 and
    is not healthy; a drained conductor is used only if no other is left, and the last one cannot be drained.
    The first gateway that answers forwards this, even a drained one: with API keys it requires one with role=admin, in
    MOONCAKE_ZMQ_API_KEY; without API keys, a gateway at a loopback address of this machine.
    The exit status is 0 once nothing is left, 1 if something is, 2 if it was refused. To end the process too, stop it.

    \b
    Examples:
      mooncake-zmq drain decode-b
      mooncake-zmq drain decode-b --undo
    """
    from mooncake_zmq.operate.console import drain as draining
    from mooncake_zmq.operate.console.terminal import Terminal

    gateways = gateways_of(path, assignments, url, ca)
    sys.exit(draining.undo(gateways, node, Terminal()) if undo else draining.drain(gateways, node, Terminal(), within_s=wait))


@main.command()
@config_option
@set_option
@click.option("--host", metavar="HOST", help="The host of FILE that this machine is; by default those whose addresses it has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(path: str, assignments: tuple[str, ...], host: str | None, as_json: bool) -> None:
    """Check this machine for its nodes, and print what to change: limits, memory, disks, clock, ports, GPU, peers.

    It changes nothing and may run while nodes run. The exit status is 0 if all is well, 1 after a warning, 2 after a
    problem: a node does not run with one.

    \b
    Examples:
      mooncake-zmq doctor
      runuser -u mooncake -- mooncake-zmq doctor --config /etc/mooncake-zmq/cluster.toml
      mooncake-zmq doctor --config cluster.toml --host host-b --json
    """
    limit_blas()
    from mooncake_zmq.operate.console.terminal import Terminal
    from mooncake_zmq.operate.doctor import examination

    findings = list(examination.examine(load_config(path, None, assignments), host))
    if as_json:
        click.echo(examination.as_json(findings))
    else:
        examination.print_findings(findings, Terminal())
    sys.exit(examination.exit_code(findings))


def _ask_conductor(loaded: Any, name: str | None, request: Any) -> None:
    """Send a request to a conductor and print its answer; a refusal ends the command."""
    from mooncake_zmq.core.commands import AskError, decode, encode
    from mooncake_zmq.operate.local_nodes import ask

    conductors = [each.name for each in loaded.config.of_role("conductor")]
    if not conductors:
        _fail(f"{loaded.path}: there is no conductor")
    asked = loaded.config.node(name).name if name else conductors[0]
    try:
        answer = ask(Path(loaded.config.cluster.runtime_dir), asked, decode(encode(request)))
    except AskError as error:
        _fail(str(error))
    if "error" in answer:
        _fail(f"{asked}: {answer['error']}")
    click.echo(json.dumps(answer, indent=1))


def _sentence(error: click.ClickException) -> str:
    """Return what is wrong, and of options and arguments also where they are explained. A command that was given none shows its
    help instead: that error is raised again."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    message = error.format_message().rstrip()
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    return f"{message.removesuffix('.')}; '{error.ctx.command_path} --help' explains it"


def _fail(message: str, code: int = 2) -> NoReturn:
    click.echo(f"mooncake-zmq: {message}", err=True)
    sys.exit(code)
