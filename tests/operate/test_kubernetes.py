"""The Kubernetes manifest of the stores: its container's arguments are ones that the program takes, and its numbers agree."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.config.load import Loaded, load_text
from mooncake_zmq.operate.options import overrides_of

MANIFEST = Path(__file__).parents[2] / "configs/kubernetes-store.yaml"
SIZES = {"Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Any]) -> Any:
    return objects["StatefulSet"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def loaded(pod: Any) -> Loaded:
    """The deployment that the container would run, in a pod with an address and a name."""
    own = {"$(POD_NAME)": "mooncake-store-0", "$(POD_IP)": "10.42.0.7"}
    assert {f"$({each['name']})" for each in pod["containers"][0]["env"]} == set(own)
    arguments = pod["containers"][0]["args"]
    for name, value in own.items():
        arguments = [each.replace(name, value) for each in arguments]
    settings = [each.removeprefix("--set=") for each in arguments if each.startswith("--set=")]
    run = CliRunner().invoke(main, [*(each for each in arguments if not each.startswith("--set=")), "--dry-run"])
    assert run.exit_code == 0, run.output
    return load_text(run.output, "manifest", overrides_of(settings), environment={})


def size(text: str) -> int:
    return int(text[:-2]) * SIZES[text[-2:]]


def test_the_container_listens_where_service_and_policy_say(objects: dict[str, Any], pod: Any, loaded: Loaded) -> None:
    (node,) = loaded.config.nodes
    listened = {int(node.store_endpoint.rpartition(":")[2]), node.store_stream_port, node.metrics_port}
    assert {each["containerPort"] for each in pod["containers"][0]["ports"]} == listened
    assert {each["port"] for each in objects["Service"]["spec"]["ports"]} == listened
    rules = objects["NetworkPolicy"]["spec"]["ingress"]
    assert {each["port"] for rule in rules for each in rule["ports"]} == listened
    open_to_all = {each["port"] for rule in rules if "from" not in rule for each in rule["ports"]}
    assert open_to_all == {node.metrics_port}


def test_names_of_service_policy_and_pods_agree(objects: dict[str, Any]) -> None:
    labels = objects["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert objects["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert objects["StatefulSet"]["spec"]["serviceName"] == objects["Service"]["metadata"]["name"]


def test_memory_and_disk_hold_what_the_store_takes(objects: dict[str, Any], pod: Any, loaded: Loaded) -> None:
    settings = loaded.config.cache_node.objects
    volumes = {each["name"]: each for each in pod["volumes"]}
    shm = size(volumes["shm"]["emptyDir"]["sizeLimit"])
    limit = size(pod["containers"][0]["resources"]["limits"]["memory"])
    assert settings.object_bytes + 8 * settings.max_objects + (2 << 20) <= shm
    assert shm + (512 << 20) <= limit
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert settings.ssd.bytes * 1.05 <= size(claim["spec"]["resources"]["requests"]["storage"])
    mounted = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted[settings.ssd.directory] == claim["metadata"]["name"]
    assert mounted[loaded.config.cluster.shm_dir] == "shm"


def test_it_ends_in_the_time_that_a_store_takes_to_write(pod: Any, loaded: Loaded) -> None:
    assert pod["terminationGracePeriodSeconds"] >= loaded.config.cluster.drain_timeout_s + 30
