"""Starts, second starts, wrong starts and ends: a clear line each time, and nothing left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import web
from toy_cluster import NODES, ROOT, ToyCluster, eventually, expected_tokens

pytestmark = pytest.mark.timeout(120)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake_zmq", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def assert_one_clear_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    line = result.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in line, line


def role(cluster: ToyCluster, name: str, node: str, *more: str) -> subprocess.CompletedProcess[str]:
    return run(name, "--node", node, *cluster.arguments, *more)


def test_a_second_start_on_the_same_directory_is_refused(cluster: ToyCluster) -> None:
    assert_one_clear_line(run("up", *cluster.arguments), "up is already running as pid")
    assert_one_clear_line(role(cluster, "decode", "decode-a"), "decode-a is already running as pid")
    assert cluster.complete()


def test_a_port_in_use_is_found_before_anything_starts(directory: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        cluster = ToyCluster(directory, port=holder.getsockname()[1])
        assert_one_clear_line(run("up", *cluster.arguments), f"127.0.0.1:{cluster.port}", "in use", "--set gateway.http_port")
        assert_one_clear_line(role(cluster, "gateway", "gateway-0"), f"127.0.0.1:{cluster.port}", "in use")
    assert cluster.leftovers() == []


def test_too_little_shared_memory_is_told_with_the_setting_to_lower(directory: Path) -> None:
    cluster = ToyCluster(directory, settings=(f"cache_node.pool_bytes={1 << 50}",))
    assert_one_clear_line(role(cluster, "cache-node", "cache-a"), "MiB free", "lower cache_node.pool_bytes")
    result = run("up", *cluster.arguments)
    assert result.returncode != 0
    assert "lower cache_node.pool_bytes" in result.stderr
    assert cluster.leftovers() == []


def test_mistakes_are_one_line(directory: Path) -> None:
    cluster = ToyCluster(directory)
    assert_one_clear_line(role(cluster, "decode", "nobody"), "there is no node 'nobody'", "decode-a")
    assert_one_clear_line(role(cluster, "decode", "prefill-a"), "prefill-a is a prefill")
    assert_one_clear_line(role(cluster, "decode", "decode-a", "--set", "decode.capacity=3"), "no setting decode.capacity")
    assert_one_clear_line(role(cluster, "decode", "decode-a", "--model", "/nowhere.gguf"), "/nowhere.gguf does not exist")
    assert_one_clear_line(run("up", *cluster.arguments, "--model", str(directory)), "config.json")
    assert_one_clear_line(run("up", "--config", "/nowhere.toml"), "/nowhere.toml: No such file")
    assert_one_clear_line(
        role(cluster, "prefill", "prefill-a", "--set", "prefill.slab_bytes=8192"), "prefill.slab_bytes", "max_model_len"
    )
    assert cluster.leftovers() == []


def test_a_role_alone_starts_drains_and_leaves_nothing(directory: Path) -> None:
    cluster = ToyCluster(directory)
    command = [sys.executable, "-m", "mooncake_zmq", "cache-node", "--node", "cache-a", *cluster.arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if b'"ready"' in line:
            break
    assert any(name.endswith(".ipc") for name in cluster.leftovers())
    process.terminate()
    assert process.wait(10) == 0
    process.stderr.close()
    assert cluster.leftovers() == []


def test_what_fits_into_no_decode_is_refused_at_the_gateway(directory: Path) -> None:
    cluster = ToyCluster(directory, settings=("decode.capacity_tokens=100", "model.block_tokens=16"))
    command = [sys.executable, "-m", "mooncake_zmq", "gateway", "--node", "gateway-0", *cluster.arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: reachable(cluster.url), what="the gateway listens")
        assert web.get(f"{cluster.url}/v1/models").json()["data"][0]["max_model_len"] == 96
        answer = web.post(f"{cluster.url}/v1/completions", json={"model": "toy", "prompt": [1] * 90, "max_tokens": 7})
        assert answer.status_code == 400
        assert "96 tokens" in answer.json()["error"]["message"]
    finally:
        process.terminate()
        assert process.wait(20) == 0


def reachable(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return web.get(f"{url}/health").status_code > 0
    return False


def test_up_killed_outright_takes_its_children_along_and_the_next_one_starts(directory: Path) -> None:
    cluster = ToyCluster(directory)
    try:
        cluster.start()
        pids = [cluster.pid(node) for node in NODES]
        assert cluster.process is not None
        cluster.process.kill()
        cluster.process.wait()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, "the children are gone")
        cluster.start()
        eventually(lambda: "ready" in cluster.told())
        # A running request does not hold up a second Ctrl-C.
        with cluster.stream(prompt=[1, 2, 3], max_tokens=3000) as stream:
            stream.read(5)
            cluster.process.send_signal(signal.SIGINT)
            eventually(lambda: "draining" in cluster.told())
            cluster.process.send_signal(signal.SIGINT)
            assert cluster.process.wait(15) == 0
        assert cluster.leftovers() == []
    finally:
        cluster.kill()


def test_a_drain_lets_running_requests_finish(directory: Path) -> None:
    cluster = ToyCluster(directory)
    try:
        cluster.start()
        with cluster.stream(prompt=[1, 2, 3], max_tokens=2000) as stream:
            stream.read(5)
            assert cluster.process is not None
            cluster.process.send_signal(signal.SIGTERM)
            assert len(stream.read()) == 2000
            assert stream.done
        assert cluster.process.wait(20) == 0
        assert cluster.leftovers() == []
    finally:
        cluster.kill()


def test_a_decode_whose_drain_ran_out_of_time_hands_its_requests_over(directory: Path) -> None:
    """And is not found out by its silence."""
    cluster = ToyCluster(directory, settings=("cluster.drain_timeout_s=0.05",))
    prompt, tokens = [1, 2, 3], 4000
    try:
        cluster.start()
        with cluster.stream(prompt=prompt, max_tokens=tokens) as stream:
            stream.read(2)  # the first token is the prefill's, and the second shows that a decode has the request
            running = {name: dump["gauges"].get("requests_running") for name, dump in cluster.dumps().items()}
            (serving,) = [name for name in ("decode-a", "decode-b") if running[name]]
            cluster.signal(serving, signal.SIGTERM)
            assert stream.read() == expected_tokens(prompt, tokens)
            assert (stream.errors, stream.done, stream.served["attempts"]) == ([], True, 2)
        counts = cluster.dumps()["gateway-0"]["counts"]
        assert counts["attempts_failed[by=decode]"] == 1
        assert "attempts_lost[state=decoding]" not in counts
        cluster.stop()
        assert cluster.leftovers() == []
    finally:
        cluster.kill()
