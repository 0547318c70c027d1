"""`mooncake-zmq restart --rolling`: its options, and what it refuses before anything is done."""

import sys
from collections.abc import Sequence

import click

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.operate.console.gateways import SERVING, NoGateway
from mooncake_zmq.operate.console.rolling import SYSTEMD, BadPlan, Roll, lasts, plan
from mooncake_zmq.operate.console.terminal import Terminal
from mooncake_zmq.operate.doctor.here import find
from mooncake_zmq.operate.options import ca_option, config_option, gateways_of, load_config, set_option, url_option
from mooncake_zmq.refused import Refused
from mooncake_zmq.transfer.process_lock import holder


@click.command()
@click.option("--rolling", is_flag=True, required=True, expose_value=False, help="One after the other; there is no other way.")
@config_option
@set_option
@url_option
@ca_option
@click.option("--only", multiple=True, metavar="NODE", help="Restart this node; can be repeated.")
@click.option(
    "--command",
    metavar="COMMAND",
    help="Restarts a node; {node}, {host}, {unit}, {role} and {pid} (on this machine) are replaced. "
    "By default `systemctl restart {unit}`, for the nodes of this machine only.",
)
@click.option("--wait", default=300.0, show_default=True, metavar="SECONDS", help="Limit of each drain and each start.")
@click.option("--yes", is_flag=True, help="Restart also nodes whose role no other node has: clients wait or are refused.")
@click.option("--dry-run", is_flag=True, help="Print the nodes in their order and the commands, and change nothing.")
def restart(
    path: str,
    assignments: tuple[str, ...],
    url: str,
    ca: str,
    only: tuple[str, ...],
    command: str | None,
    wait: float,
    *,
    yes: bool,
    dry_run: bool,
) -> None:
    """Restart nodes one after the other without an error for clients: drain one, restart it, wait until it serves, next.

    Cache-nodes come first, then prefills, decodes and vLLMs, then gateways, then conductors. It ends at the first node that
    does not come back, and prints how to continue. With API keys it needs an admin's, as `drain` does.
    The exit status is 0 if all nodes were restarted, 1 if one did not come back, 2 if nothing was done.

    \b
    Examples:
      mooncake-zmq restart --rolling --config /etc/mooncake-zmq/cluster.toml
      mooncake-zmq restart --rolling --command 'ssh {host} systemctl restart {unit}' --dry-run
      mooncake-zmq restart --rolling --only decode-a --only decode-b
      mooncake-zmq restart --rolling --command 'kill {pid}'      # nodes of `mooncake-zmq up`, which starts them again
    """
    loaded = load_config(path, None, assignments)
    gateways, console = gateways_of(path, assignments, url, ca), Terminal()
    runtime_dir = loaded.config.cluster.runtime_dir
    again = _command_line(path, assignments, url, ca, command, wait, yes=yes)
    roll = Roll(
        gateways, console, command or SYSTEMD, lambda node: holder(runtime_dir, node) or 0, wait, again, takes_lasts=yes
    )
    nodes = loaded.config.nodes if command else find(loaded, None).nodes
    if not command and (others := [node.name for node in loaded.config.nodes if node not in nodes and node.name in only]):
        raise Refused(f"{', '.join(others)}: not on this machine; give --command 'ssh {{host}} {SYSTEMD}'")
    try:
        snapshot = gateways.snapshot()[1]
        steps = plan(nodes, snapshot, only)
        roll.show(steps)
    except (NoGateway, BadPlan) as error:
        raise Refused(str(error)) from None
    if not command and (others := _elsewhere(loaded, [step.host for step in steps])) and not only:
        console.print(f"run it on {', '.join(others)} as well, or give --command", highlight=False, markup=False)
    if dry_run:
        return
    if snapshot["status"] not in SERVING:
        raise Refused(f"the cluster does not serve, so that no restart could be judged: {snapshot['verdict']}")
    if (last := lasts(steps)) and not yes:
        raise Refused(f"no other node does what {', '.join(last)} does: clients would wait or be refused; --yes allows it")
    sys.exit(roll.run(steps))


def _command_line(
    path: str, assignments: Sequence[str], url: str, ca: str, command: str | None, wait: float, *, yes: bool
) -> list[str]:
    """Return the words by which the command goes on with nodes that are named after them."""
    given = {"--config": path, "--url": url, "--ca": ca, "--command": command or ""}
    words = ["mooncake-zmq", "restart", "--rolling", *(word for option in given.items() if option[1] for word in option)]
    return [*words, *(word for each in assignments for word in ("--set", each)), "--wait", f"{wait:g}", *(["--yes"] * yes)]


def _elsewhere(loaded: Loaded, hosts: Sequence[str]) -> list[str]:
    """Return the hosts of the configuration that have none of the steps."""
    return sorted({node.host for node in loaded.config.nodes} - set(hosts))
