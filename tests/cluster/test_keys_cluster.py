"""A cluster over TCP whose nodes know each other by keys, and a process that is refused because it has none."""

import subprocess
import sys
import tomllib
from pathlib import Path

import certificates
import httpx
import pytest
import web
from toy_cluster import ROOT, ToyCluster, eventually, expected_tokens, free_port, greedy, until_none

from mooncake_zmq.gateway.http.tls import trusting
from mooncake_zmq.operate.usage import read
from mooncake_zmq.transfer import key_files

pytestmark = pytest.mark.timeout(120)
PROMPT = [(7 * position) % 250 for position in range(300)]


def over_tcp(path: Path) -> Path:
    """The toy cluster's file with addresses instead of sockets in a directory."""
    text = (ROOT / "configs/toy.toml").read_text()
    for node in tomllib.loads(text)["nodes"]:
        named = f'name = "{node["name"]}"\n'
        places = (f'{what} = "tcp://127.0.0.1:{free_port()}"\n' for what in ("endpoint", "data_endpoint"))
        text = text.replace(named, named + "".join(places))
    path.write_text(text)
    return path


def test_a_cluster_with_keys_gives_the_right_tokens_and_rotates_one_while_it_runs(directory: Path) -> None:
    config, keys = over_tcp(directory / "tcp.toml"), directory / "keys"
    made = subprocess.run(
        [sys.executable, "-m", "mooncake_zmq", "keys", "make", "--config", str(config), "--to", str(keys)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(made.stdout.splitlines()) == 8 + 1
    api_keys = directory / "api_keys"

    def api_key(name: str, *options: str) -> str:
        command = [sys.executable, "-m", "mooncake_zmq", "keys", "api", name, "--in", str(api_keys), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    secret, operators = api_key("alice", "--requests", "1000"), api_key("watch", "--role", "metrics")
    shown = certificates.make(directory)
    settings = (f"security.keys={keys}", f"gateway.api_keys={api_keys}")
    settings += (f"gateway.usage_directory={directory / 'usage'}",)
    settings += (f"gateway.tls_certificate={shown.certificate}", f"gateway.tls_key={shown.key}")
    cluster = ToyCluster(directory / "run", config=str(config), settings=settings)
    cluster.url = cluster.url.replace("http:", "https:")
    cluster.trusts, cluster.operators_key = trusting(shown.certificate), operators

    def ask(prompt: list[int], key: str = secret) -> httpx.Response:
        body, headers = greedy(prompt=prompt, max_tokens=8), {"authorization": f"Bearer {key}"}
        url = f"{cluster.url}/v1/completions"
        return web.post(url, json=body, headers=headers, verify=trusting(shown.certificate), timeout=60)

    try:
        cluster.start()
        until_none(cluster.missing, 30)
        # Each host's decode takes what the other's prefill made: blocks cross the network, which is encrypted too.
        for first in range(3):
            prompt = [first, *PROMPT]
            assert ask(prompt).json()["choices"][0]["token_ids"] == expected_tokens(prompt, 8)
        assert ask(PROMPT, "guessed").status_code == 401
        assert web.get(f"{cluster.url}/health", verify=cluster.trusts).json() == {"status": "ok"}
        renewed = certificates.make(directory, "renewed")
        shown.key.write_bytes(renewed.key.read_bytes())
        shown.certificate.write_bytes(renewed.certificate.read_bytes())
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            eventually(lambda: not web.get(f"{cluster.url}/live", verify=cluster.trusts), 20, "the old one is not shown")
        cluster.trusts = trusting(shown.certificate)
        key_files.rotate(keys, "decode-a")
        before = cluster.pid("decode-a")
        cluster.signal("decode-a", 9)
        eventually(lambda: cluster.pid("decode-a") != before, 30, "decode-a comes back")
        until_none(cluster.missing, 30)
        assert key_files.drop(keys, "decode-a") == 1
        assert ask(PROMPT).json()["choices"][0]["token_ids"] == expected_tokens(PROMPT, 8)
        eventually(lambda: sum(each.calls for each in read(directory / "usage")) == 4, 20, "alice's calls are written")
        used = list(read(directory / "usage"))
        assert {each.key for each in used} == {"alice"}
        assert sum(each.prompt_tokens for each in used) == 3 * len(prompt) + len(PROMPT)
        assert sum(each.completion_tokens for each in used) == 4 * 8
        api_keys.write_text("")
        eventually(lambda: ask(PROMPT).status_code == 401, 20, "alice is out")
        edge = cluster.dumps()["gateway-0"]["edge"]
        assert edge["counts"]["http_handshakes_failed"] >= 1
        counts = {name: count for dump in cluster.dumps().values() for name, count in dump["session"]["counts"].items()}
        assert "dropped[reason=not_its_key]" not in counts
        cluster.stop()
        assert cluster.errors() == []
    finally:
        cluster.kill()


def test_a_node_on_a_network_without_keys_says_what_to_do_and_ends(directory: Path) -> None:
    config = directory / "far.toml"
    config.write_text((ROOT / "configs/toy.toml").read_text().replace(
        'name = "conductor-0"\n', 'name = "conductor-0"\nendpoint = "tcp://10.11.12.13:7000"\n'))  # fmt: skip
    command = [sys.executable, "-m", "mooncake_zmq", "conductor", "--config", str(config), "--node", "conductor-0"]
    command += ["--set", f"cluster.runtime_dir={directory / 'run'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        "mooncake-zmq: conductor-0: tcp://10.11.12.13:7000: TCP beyond this machine"
    )
    assert "mooncake-zmq keys make" in ended.stderr
    assert "security.allow_plain_tcp = true" in ended.stderr


def test_a_gateway_on_a_network_without_api_keys_says_what_to_do_and_ends(directory: Path) -> None:
    config = str(ROOT / "configs/toy.toml")
    for command in (["gateway", "--config", config, "--node", "gateway-0"], ["up", "--config", config]):
        command += ["--set", f"cluster.runtime_dir={directory / 'run'}", "--set", "gateway.http_host=0.0.0.0"]
        ended = subprocess.run(
            [sys.executable, "-m", "mooncake_zmq", *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 2
        assert "http_host 0.0.0.0 is not loopback, and there are no API keys" in ended.stderr
        assert "gateway.allow_open = true" in ended.stderr
