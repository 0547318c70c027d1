"""The bill of materials: all that is imported is in it, with a licence."""

import json
import sys
from importlib.metadata import packages_distributions

from click.testing import CliRunner

from mooncake_zmq.cli import main


def test_it_names_what_the_program_is_made_of_with_versions_and_licences():
    told = CliRunner().invoke(main, ["sbom"])
    assert told.exit_code == 0
    bill = json.loads(told.output)
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "mooncake-zmq")
    named = {each["name"]: each for each in bill["components"]}
    assert named["pyzmq"]["purl"] == f"pkg:pypi/pyzmq@{named['pyzmq']['version']}"
    assert [name for name, each in named.items() if "licenses" not in each] == []
    refs = {each["bom-ref"] for each in (*named.values(), bill["metadata"]["component"])}
    assert {each["ref"] for each in bill["dependencies"]} == refs
    assert {ref for each in bill["dependencies"] for ref in each["dependsOn"]} <= refs


def test_whatever_is_imported_by_the_time_a_gateway_is_there_is_in_it():
    import mooncake_zmq.runtime.process  # noqa: F401

    bill = json.loads(CliRunner().invoke(main, ["sbom"]).output)
    named = {each["name"] for each in bill["components"]} | {"mooncake-zmq", "pip"}
    owners = packages_distributions()
    imported = {name.partition(".")[0] for name in sys.modules}
    missing = {owner.lower().replace("_", "-") for name in imported for owner in owners.get(name, ())} - named
    assert missing == set()


def test_the_list_of_licences_is_a_line_each():
    told = CliRunner().invoke(main, ["sbom", "--licences"])
    assert told.exit_code == 0
    assert any(line.split()[:1] == ["pyzmq"] for line in told.output.splitlines())
