"""Coding agents as they are published, in sessions of twenty turns with tools, and a kill -9 of the vLLM in mid-call.

REQUIRE_AGENTS=DIR names a directory in which `npm install @anthropic-ai/claude-code @openai/codex opencode-ai` was run; without
it these are skipped. The model is a stand-in that speaks as it is told.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_vllm import BLOCK, IN_NAMESPACE, STANDS_STILL_AT, TURNS, write_model
from toy_cluster import ROOT, eventually
from vllm_cluster import VllmCluster

AGENTS = os.environ.get("REQUIRE_AGENTS", "")
pytestmark = [
    pytest.mark.skipif(not AGENTS, reason="REQUIRE_AGENTS names no directory with the agents"),
    pytest.mark.timeout(300),
]
TASK = "Take all steps."
DONE = "ALL STEPS ARE DONE."


class Servers:
    """Two stand-ins, each a process, and the log of what they are asked and answer."""

    def __init__(self, directory: Path) -> None:
        self.model = write_model(directory / "models" / "scripted")
        self._log = directory / "log"
        command = [sys.executable, str(ROOT / "tests/helpers/scripted_vllm.py"), str(self.model), str(self._log)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])
        environment = os.environ | {"PYTHONPATH": paths}
        self.processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) for _ in range(2)
        ]
        lines = [process.stdout.readline().strip() for process in self.processes if process.stdout]
        self.urls = (lines[0], lines[1])

    def logged(self) -> list[dict[str, Any]]:
        """Return what they wrote, in order."""
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def kill_where_one_stands_still(self) -> int:
        """Kill the server whose answer stands still, and return its pid."""
        found = eventually(
            lambda: [each["pid"] for each in self.logged() if "stands_still" in each], 120, "a call stands still"
        )
        os.kill(found[0], signal.SIGKILL)
        return int(found[0])

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def servers(directory: Path) -> Iterator[Servers]:
    made = Servers(directory)
    yield made
    made.stop()


@pytest.fixture
def cluster(directory: Path, servers: Servers) -> Iterator[VllmCluster]:
    settings = (f"model.block_tokens={BLOCK}", "model.max_model_len=1000000", "vllm.capacity_tokens=4000000")
    made = VllmCluster(directory / "cluster", servers.model, servers.urls, settings)
    with made.running():
        yield made


def claude_code(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of a session of Claude Code, and its environment."""
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    return ["claude", "-p", TASK, "--dangerously-skip-permissions"], environment


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of a session of Codex, and its environment."""
    provider = f'name = "ours"\nbase_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "OUR_KEY"\n'
    (home / "config.toml").write_text(f'model = "scripted"\nmodel_provider = "ours"\n[model_providers.ours]\n{provider}')
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    return command, {"CODEX_HOME": str(home), "OUR_KEY": "none"}


def opencode(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of a session of OpenCode, and its environment."""
    served = {"scripted": {"name": "scripted", "limit": {"context": 200_000, "output": 8000}}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "ours", "options": options, "models": served}
    (home / "work" / "opencode.json").write_text(json.dumps({"provider": {"ours": provider}, "permission": "allow"}))
    return ["opencode", "run", "-m", "ours/scripted", TASK], {}


@pytest.mark.parametrize("agent", [claude_code, codex, opencode])
def test_a_session_of_an_agent_finds_its_kv_in_each_turn_and_outlives_its_vllm(
    agent: Any, cluster: VllmCluster, servers: Servers, directory: Path
) -> None:
    home = directory / "home"
    (home / "work").mkdir(parents=True)
    (program, *arguments), settings = agent(cluster.url, home)
    command = [str(Path(AGENTS) / "node_modules" / ".bin" / program), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)} | settings
    with (home / "out").open("wb") as out, (home / "errors").open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment, cwd=home / "work"
        )
        try:
            killed = servers.kill_where_one_stands_still()
            code = process.wait(180)
        finally:
            process.kill()
    said = (home / "out").read_text()
    assert (code, DONE in said) == (0, True), said + (home / "errors").read_text()

    turns = [each for each in servers.logged() if each.get("tools")]
    fresh, resumed = ([each for each in turns if each["resumed"] is is_it] for is_it in (False, True))
    assert len(fresh) == TURNS + 1, "each turn was asked for once"
    assert len(resumed) == 1, "and the one that was cut went on elsewhere"
    assert {each["pid"] for each in fresh[:STANDS_STILL_AT]} == {killed}
    assert {each["pid"] for each in [*resumed, *fresh[STANDS_STILL_AT:]]} == {each.pid for each in servers.processes} - {killed}
    assert all("unsupported call" not in each["text"] for each in turns)
    assert (f'{{"name": "{IN_NAMESPACE}"' in turns[-1]["text"]) == (agent is codex), "a function of a namespace was called"
    for before, turn in zip(fresh, fresh[1:], strict=False):
        same = next(
            (place for place, pair in enumerate(zip(before["prompt"], turn["prompt"], strict=False)) if pair[0] != pair[1]),
            len(before["prompt"]),
        )
        assert same >= 0.95 * len(before["prompt"]), "a turn's prompt begins with that of the last one"
        assert turn["cached"] >= 0.95 * same, "and its KV is where it was sent"
