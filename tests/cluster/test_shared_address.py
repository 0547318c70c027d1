"""Two gateways behind one address: both serve, one is killed or drained, and clients find the other."""

import contextlib
import signal
import threading
import tomllib
from pathlib import Path

import httpx
import pytest
import web
from toy_cluster import ROOT, ToyCluster, eventually, expected_tokens, free_port, greedy

pytestmark = pytest.mark.timeout(280)
GATEWAYS = {"gateway-0", "gateway-1"}
PROMPT = [(7 * position) % 250 for position in range(60)]


@pytest.fixture
def cluster(directory: Path):
    path = directory / "two.toml"
    path.write_text(
        (ROOT / "configs/toy.toml").read_text()
        + f'metrics_port = {free_port()}\n\n[[nodes]]\nname = "gateway-1"\nrole = "gateway"\nmetrics_port = {free_port()}\n'
    )
    cluster = ToyCluster(directory / "run", config=str(path), settings=("gateway.reuse_port=true",))
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        cluster.kill()


def answering(cluster: ToyCluster, looks: int = 40) -> set[str]:
    """Who answers new connections."""
    found = set()
    for _ in range(looks):
        found.add(web.get(f"{cluster.url}/health", timeout=5).json()["gateway"])
    return found


def answered(cluster: ToyCluster) -> list[int]:
    """Calls that each gateway answered, by metrics of its own."""
    nodes = tomllib.loads(Path(cluster.arguments[1]).read_text())["nodes"]
    texts = [web.get(f"http://127.0.0.1:{node['metrics_port']}/metrics").text for node in nodes if "metrics_port" in node]
    return [int(float(text.partition('edge_http_responses_total{status="200"} ')[2].split()[0])) for text in texts]


def ask(cluster: ToyCluster) -> None:
    answer = web.post(f"{cluster.url}/v1/completions", json=greedy(prompt=PROMPT, max_tokens=4), timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4)


@contextlib.contextmanager
def asking_all_the_time(cluster: ToyCluster, clients: int = 4):
    """New connections without end; yields the failures."""
    failures: list[str] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            try:
                ask(cluster)
            except (httpx.HTTPError, AssertionError) as error:
                failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join()


def has_ended(pid: int) -> bool:
    """A zombie without other threads has closed its sockets."""
    process = Path(f"/proc/{pid}")
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z" and len(
            list((process / "task").iterdir())
        ) == 1
    except (FileNotFoundError, ProcessLookupError):  # the latter if it is reaped between opening and reading
        return True


def restarts(cluster: ToyCluster, gateway: str, number: signal.Signals) -> None:
    """`up` starts who has ended again."""
    log = cluster.runtime_dir / "logs" / f"{gateway}.log"
    lives = log.read_text().count('"started"')
    cluster.signal(gateway, number)
    eventually(lambda: log.read_text().count('"started"') > lives, 30, f"{gateway} is started again")


def reached(cluster: ToyCluster) -> set[str]:
    """Who answers new connections; nobody, where one is refused."""
    try:
        return answering(cluster)
    except httpx.ConnectError:
        return set()


def refused(cluster: ToyCluster) -> bool:
    return web.post(f"{cluster.url}/v1/completions", json=greedy(prompt=PROMPT, max_tokens=4)).status_code == 503


def drain(cluster: ToyCluster, gateway: str, method: str = "POST") -> None:
    """By whichever is there."""
    answer = web.request(method, f"{cluster.url}/admin/drain/{gateway}", timeout=30)
    assert answer.status_code == 200, answer.text


def test_one_that_rests_leaves_the_address_while_the_other_serves_there(cluster: ToyCluster) -> None:
    eventually(lambda: answering(cluster) == GATEWAYS, 30, "both gateways serve")
    with asking_all_the_time(cluster) as failures:
        for _ in range(3):
            drain(cluster, "gateway-1")
            eventually(lambda: answering(cluster) == {"gateway-0"}, 30, "gateway-1 has left")
            drain(cluster, "gateway-1", "DELETE")
            eventually(lambda: answering(cluster) == GATEWAYS, 30, "gateway-1 is back")
    assert not failures, f"{len(failures)}: {failures[:3]}"
    drain(cluster, "gateway-1")
    eventually(lambda: answering(cluster) == {"gateway-0"}, 30, "gateway-1 has left again")
    drain(cluster, "gateway-0")
    eventually(lambda: answering(cluster) == GATEWAYS, 30, "neither serves, so both say so")
    assert refused(cluster)
    for gateway in GATEWAYS:
        drain(cluster, gateway, "DELETE")
    eventually(lambda: answering(cluster) == GATEWAYS, 30, "both serve again")
    ask(cluster)
    drain(cluster, "gateway-1")
    eventually(lambda: answering(cluster) == {"gateway-0"}, 30, "gateway-1 is away")
    rested = cluster.pid("gateway-1")
    cluster.signal("gateway-1", signal.SIGTERM)
    eventually(lambda: has_ended(rested), 30, "who is away can be stopped")
    eventually(lambda: answering(cluster) == GATEWAYS, 30, "a new life serves")


def test_it_is_left_to_nobody_who_does_not_listen_there(cluster: ToyCluster) -> None:
    eventually(lambda: answering(cluster) == GATEWAYS, 30, "both gateways serve")
    drain(cluster, "gateway-0")
    eventually(lambda: answering(cluster) == {"gateway-1"}, 30, "gateway-0 has left")
    for decode in ("decode-a", "decode-b"):
        cluster.signal(decode, signal.SIGSTOP)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            restarts(cluster, "gateway-1", number)
            eventually(lambda: reached(cluster) == {"gateway-0"}, 30, "gateway-1 cannot serve: gateway-0 is back")
            assert refused(cluster)
            drain(cluster, "gateway-0", "DELETE")
            drain(cluster, "gateway-0")
            assert answering(cluster, 60) == {"gateway-0"}, "nobody is there to leave it to"
        drain(cluster, "gateway-1")
    finally:
        for decode in ("decode-a", "decode-b"):
            cluster.signal(decode, signal.SIGCONT)
    eventually(lambda: reached(cluster) == GATEWAYS, 60, "gateway-1 is there once it could serve, though it rests")
    drain(cluster, "gateway-1", "DELETE")
    eventually(lambda: reached(cluster) == {"gateway-1"}, 60, "gateway-1 serves, so gateway-0 leaves")
    ask(cluster)


def test_either_of_two_gateways_may_go(cluster: ToyCluster) -> None:
    eventually(lambda: answering(cluster) == GATEWAYS, 30, "both gateways serve")
    assert all(count > 0 for count in answered(cluster))
    killed = cluster.pid("gateway-0")
    cluster.signal("gateway-0", signal.SIGKILL)
    eventually(lambda: has_ended(killed), 30, "gateway-0 is dead")
    with asking_all_the_time(cluster) as failures:  # its place is taken, and not given back before it can serve
        eventually(lambda: answering(cluster) == GATEWAYS, 30, "gateway-0 is started again")
        drained = cluster.pid("gateway-1")
        cluster.signal("gateway-1", signal.SIGTERM)
        eventually(lambda: has_ended(drained), 30, "gateway-1 has drained")
        eventually(lambda: answering(cluster) == GATEWAYS, 30, "gateway-1 is started again")
    assert not failures, f"{len(failures)}: {failures[:3]}"
