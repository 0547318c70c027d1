"""Finds the commands of the README and the pages, and says how each is tried: at toy size, on a live cluster, or why not."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "mooncake_zmq/docs").glob("*.md")))
FENCED = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SUBSTITUTED = re.compile(r"\$\((.*?)\)")


@dataclass(frozen=True)
class PageCommand:
    """One simple command of a page, as words. `line`: the same as text."""

    page: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        return " ".join(self.words)


TOY_SIZE = {
    r"mooncake-zmq config (check|show|units|ports)": "",
    r"mooncake-zmq doctor": "--set cluster.runtime_dir=RUNTIME",
    r"mooncake-zmq model inspect ": "",
    r"mooncake-zmq keys ": "",
    r"mooncake-zmq usage ": "",
    r"mooncake-zmq attach --flags ": "",
    r"mooncake-zmq sim (conversation_trace|--generate)": "",
    r"mooncake-zmq trace-data": "",
    r"mooncake-zmq bench answers": "--seeds 1 --requests 2000 --keys 200 --entries 160 --read 500 --sizes 20",
    r"mooncake-zmq bench zoo$": "--small --only quiet --policy global --prefill 2 --decode 2",
    r"mooncake-zmq simtest --seeds 10000": "--seeds 1",
}
"""Commands that run in the test's own process -> options that make them small; later options override earlier ones."""

LIVE = {
    r"mooncake-zmq (status|trace|dump|drain) ": "",
    r"mooncake-zmq top ": "",
    r"curl -s localhost:8000/v1/chat/completions ": "",
    r"curl -s localhost:8000/v1/(messages|responses) ": "",
    r"curl -s http://GATEWAY:8000/health": "",
    r"mooncake-zmq bench client http://127.0.0.1:8000 ": "--block-tokens 4 --limit 8 --speed 100",
    r"mooncake-zmq answers fill http://127.0.0.1:8000 ": "--nll 8 --dry-run",
    r"mooncake-zmq bench serve": "--config configs/toy.toml --rounds 1 --only warm",
    r"mooncake-zmq bench meet": "--config configs/toy.toml --rounds 1 --tokens 512",
    r"mooncake-zmq bench gateway": "--only ttft --rounds 1",
    r"mooncake-zmq bench overload": "--seconds 3 --prompt-tokens 1024",
    r"mooncake-zmq bench zoo --live$": "--only bursts",
}
"""Commands that ask a running cluster, or start one -> options that make them small."""

NOT_RUN = {
    r"bin/up": "every cluster test starts `up`; the default model is a download",
    r"mooncake-zmq attach http": "tests/cluster/test_attach_live.py attaches two stand-ins",
    r"mooncake-zmq up --(config FILE|model ~/models)": "every cluster test does",
    r"bin/vllm-versions": "makes environments of 2 GB each; run by hand",
    r"docker |kubectl |bin/release": "needs Docker or Kubernetes; bin/release tries the image that it builds",
    r"bin/(test|cache-node)|\.ci/run": "runs this test, or is tried by tests/test_launchers.py",
    r"bin/install|git pull|cp |vi |install -|mkdir |printf |systemctl |journalctl |export |grep ": "needs root, or systemd",
    r"pip install|python3 -m venv|\S+/pip install|\S+/python -m pytest": "downloads packages",
    r"vllm serve|mooncake-zmq bench vllm|mooncake-zmq bench .*--(vllm|router|mooncake)-python": "needs another engine",
    r"mooncake-zmq prove vllm": "needs vLLM; tests/prove runs it with stand-ins",
    r"mooncake-zmq bench zoo --live --config": "minutes of real engines; the toy's run is the same code",
    r"mooncake-zmq bench (all|compare)": "half an hour a turn; tests/bench/test_everything.py gives `compare` small reports",
    r"mooncake-zmq bench lending": "minutes; tests/bench/test_bench_lending.py runs it small",
    r"mooncake-zmq bench attend": "minutes; tests/bench/test_bench_attend.py runs its rows",
    r"mooncake-zmq bench blend": "ten minutes; tests/bench/test_bench_blend.py runs its rows",
    r"mooncake-zmq bench codecs": "seven minutes; tests/bench/test_bench_codecs.py runs its rows",
    r"mooncake-zmq bench select": "five minutes; tests/bench/test_bench_select.py runs its rows",
    r"mooncake-zmq bench longprompt": "three minutes; tests/bench/test_longprompt.py runs its rows",
    r"mooncake-zmq bench pool($| --only)": "a minute; tests/bench/test_pool.py runs its rows",
    r"mooncake-zmq profile": "tests/bench/test_profile_command.py runs it",
    r"mooncake-zmq store( |$)": "serves until it is stopped; tests/operate/test_store_command.py runs it",
    r"mooncake-zmq reproduce systems": "an hour; tests/laboratory/test_systems.py runs its commands at toy size",
    r"mooncake-zmq reproduce": "minutes to an hour; tests/laboratory/test_reproduce.py runs figures at small size",
    r"mooncake-zmq simtest --seeds 5 --planted": "tests/simulation/test_seeds.py plants every bug",
    r"mooncake-zmq compile|mooncake-zmq simtest --seeds 20 --compiled": "two minutes; CI runs both",
    r"bin/chaos": "minutes to hours; tests/chaos runs each kind for seconds",
    r"mooncake-zmq fuzz": "minutes; tests/fuzz gives each decoder some inputs",
    r"python tests/architecture": "tests/architecture runs it",
    r"npm install|ANTHROPIC_BASE_URL|opencode ": "1 GB of packages; tests/cluster/test_agents.py runs all three where they are",
    r"mooncake-zmq restart --rolling": "minutes; tests/cluster/test_rolling_restart.py restarts a whole cluster",
    r"mooncake-zmq sim trace.jsonl": "needs a profile of this machine's engine",
}
"""Commands that no test runs as they stand -> the reason."""


def page_commands() -> list[PageCommand]:
    """Return every command in a fenced block, without comments and `runuser`; one that several pages have only once."""
    found: dict[tuple[str, ...], PageCommand] = {}
    for page in PAGES:
        for command in _commands(page):
            found.setdefault(command.words, command)
    return list(found.values())


def how(command: PageCommand, table: Mapping[str, str]) -> str | None:
    """Return what `table` says of a command: its first pattern that matches from the beginning; None if there is none."""
    return next((text for pattern, text in table.items() if re.match(pattern, command.line)), None)


def _commands(page: Path) -> Iterator[PageCommand]:
    for block in FENCED.findall(page.read_text()):
        for line in _whole_lines(block):
            for inner in SUBSTITUTED.findall(line):
                yield PageCommand(page.stem, tuple(shlex.split(inner)))
            words = shlex.split(SUBSTITUTED.sub("", line), comments=True)
            for simple in _split(words):
                yield PageCommand(page.stem, tuple(simple))


def _whole_lines(block: str) -> Iterator[str]:
    """Yield lines together with those that a backslash or an open quotation mark continues them on."""
    begun = ""
    for line in block.splitlines():
        begun = f"{begun}\n{line}" if begun else line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        yield begun
        begun = ""
    assert not begun, f"a command does not end: {begun}"


def _split(words: list[str]) -> Iterator[list[str]]:
    """Yield the simple commands between `&&` and `|`."""
    simple: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", "|"):
            if simple:
                yield simple[simple.index("--") + 1 :] if simple[0] == "runuser" else simple
            simple = []
        else:
            simple.append(word)
