"""`attach` with two real vLLMs, started with the flags that it prints: REQUIRE_VLLM=PYTHON, as for `test_real_vllm.py`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from test_real_vllm import ENVIRONMENT, PROMPT, PYTHON, START_S, write_llama
from toy_cluster import Stream, eventually, greedy, until_none
from vllm_cluster import AttachedCluster

NAME = "org/tiny"
ANSWER = 3500
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="REQUIRE_VLLM names no Python with vLLM"),
    pytest.mark.timeout(3600),
]


def flags(url: str, store: str) -> list[str]:
    """What a shell makes of `$(mooncake-zmq attach --flags URL)`, with a store at a free port."""
    command = [sys.executable, "-m", "mooncake_zmq", "attach", "--flags", url]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "127.0.0.1:7301" in printed
    return printed.replace("127.0.0.1:7301", store).split()


@pytest.fixture
def servers(directory: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two servers by URL, which are not waited for."""
    model, store = write_llama(directory / "models" / "tiny"), f"127.0.0.1:{free_port()}"
    started: dict[str, subprocess.Popen[bytes]] = {}
    sockets: list[Path] = []
    try:
        for port in (free_port(), free_port()):
            url = f"http://127.0.0.1:{port}"
            sockets.append(Path(f"/tmp/vllm-{port}.events.ipc"))
            command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
            command += ["--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", *flags(url, store)]
            with (directory / f"{port}.log").open("wb") as log:
                started[url] = subprocess.Popen(
                    command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
                )
        yield started
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for path in sockets:
            path.unlink(missing_ok=True)


def test_an_answer_outlives_its_server(directory: Path, servers: dict[str, subprocess.Popen[bytes]]) -> None:
    began_at = time.monotonic()
    made = AttachedCluster(directory, list(servers))
    try:
        process = made.up()
        eventually(lambda: process.poll() is not None or made.complete(), START_S, "the cluster starts")
        assert " lacks " not in made.told(), made.told()
        whole = made.complete_text(model=NAME, prompt=PROMPT, max_tokens=ANSWER)["choices"][0]["token_ids"]
        print(f"the first answer {time.monotonic() - began_at:.0f} s after the servers were started")
        assert len(whole) == ANSWER
        again = made.complete_text(model=NAME, prompt=PROMPT, max_tokens=8)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
        home = again["mooncake"]["prefill"]
        urls = {f"vllm-{number}": url for number, url in enumerate(servers)}
        body = greedy(model=NAME, prompt=PROMPT, max_tokens=ANSWER, stream=True, stream_options={"include_usage": True})
        with Stream(made.url, body) as stream:
            stream.read(1)
            os.killpg(servers[urls.pop(home)].pid, signal.SIGKILL)
            killed_at = time.monotonic()
            stream.read(min(len(stream.tokens) + 60, ANSWER))
            print(f"tokens again {time.monotonic() - killed_at:.2f} s after the death")
            assert stream.read() == whole
        assert not stream.errors
        assert stream.served["attempts"] == 2, "the death was in the answer"
        until_none(made.busy_gauges, 60)
        made.stop()
    finally:
        made.kill()
