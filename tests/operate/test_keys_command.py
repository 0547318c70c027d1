"""`mooncake-zmq keys`: what it writes, what it prints, and what it refuses in one line."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from mooncake_zmq.gateway.http.api_keys import ApiKeys, read
from mooncake_zmq.gateway.requests.tenants import MAX_TENANTS, Tenants, digest_of
from mooncake_zmq.operate.keys import keys
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.key_files import SETTLED_S

NODES = "[[nodes]]\nname = 'a'\nrole = 'conductor'\n[[nodes]]\nname = 'b'\nrole = 'gateway'\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(keys, [str(each) for each in arguments])


def made(tmp_path: Path) -> Path:
    config = tmp_path / "cluster.toml"
    config.write_text(NODES)
    told = run("make", "--config", config, "--to", tmp_path / "keys", "--store", "client", "--events", "client")
    assert told.exit_code == 0, told.output
    return tmp_path / "keys"


def test_a_key_is_made_for_each_node_and_client_and_made_once(tmp_path: Path) -> None:
    directory = made(tmp_path)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert before.keys() == {"public_keys", "a.secret", "b.secret", "client.secret"}
    assert {path.stat().st_mode & 0o777 for path in directory.glob("*.secret")} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    made(tmp_path)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    listed = run("list", "--in", directory).output.splitlines()
    assert [line.split()[:2] for line in listed] == [["a", "node"], ["b", "node"], ["client", "store,events"]]


def test_a_rotated_name_has_two_keys_until_one_is_dropped(tmp_path: Path) -> None:
    directory = made(tmp_path)
    (first,) = run("show", "a", "--in", directory).output.split()
    assert run("rotate", "a", "--in", directory).exit_code == 0
    newest, former = run("show", "a", "--in", directory).output.split()
    assert former == first
    assert key_files.load(directory, "a").public == newest
    again = run("rotate", "a", "--in", directory)
    assert again.exit_code == 2
    assert "drop the former one" in again.output
    assert run("drop", "a", "--in", directory).exit_code == 0
    assert run("show", "a", "--in", directory).output.split() == [newest]
    assert "has one key, which stays" in run("drop", "a", "--in", directory).output


def test_what_cannot_be_done_is_told_in_a_line(tmp_path: Path) -> None:
    directory = made(tmp_path)
    for arguments in (
        ("show", "nobody", "--in", directory),
        ("rotate", "nobody", "--in", directory),
        ("list", "--in", tmp_path / "nowhere"),
        ("make", "--to", directory),
        ("make", "--to", directory, "--store", "Not A Name"),
        ("make", "--config", tmp_path / "cluster.toml", "--to", directory, "--store", "a"),
    ):
        told = run(*arguments)
        assert told.exit_code == 2
        assert len(told.output.splitlines()) == 1
        assert told.output.startswith("Error: ")


def test_an_api_key_is_printed_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "api_keys"
    secret = run("api", "alice", "--in", path, "--requests", 60, "--share", 0.25).output.strip()
    admin = run("api", "root", "--in", path, "--role", "admin").output.strip()
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    tenants = Tenants(read(path), 8)
    assert tenants.of(secret) is not None
    assert [(each.name, each.requests, each.share, each.role) for each in read(path)] == [
        ("alice", 60, 0.25, "user"),
        ("root", 0, 0.5, "admin"),
    ]
    assert "--replace" in run("api", "alice", "--in", path).output
    other = run("api", "alice", "--in", path, "--replace").output.strip()
    tenants.replace(read(path))
    assert [tenants.of(each) is not None for each in (secret, other, admin)] == [False, True, True]


def test_a_name_made_anew_shares_no_prefix_with_the_one_before_unless_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api_keys"

    def salt(*options: str) -> str:
        assert run("api", "alice", "--in", path, *options).exit_code == 0
        return read(path)[0].salt("")

    first = salt()
    assert salt("--replace") == first
    forgotten = salt("--replace", "--forget")
    path.write_text("")
    assert len({first, forgotten, salt()}) == 3
    path.write_text(f"alice:{'0' * 64}\n")
    assert salt("--replace") == "tenant/alice/", "as of lines of older releases"
    assert run("api", "alice", "--in", path, "--forget").exit_code == 2


def test_whose_api_key_is_taken_away_is_out_whatever_else_is_wrong_with_the_file(tmp_path: Path) -> None:
    """And nobody is let in by such a file."""
    path, now = tmp_path / "api_keys", 0.0
    alice, thief = (run("api", name, "--in", path).output.strip() for name in ("alice", "thief"))
    kept = path.read_text().splitlines()[0]
    keys_of_file = ApiKeys(path, 8)
    keys_of_file.clock = lambda: now
    tenants = keys_of_file.tenants
    new = f"new:{digest_of('new')}"
    path.write_text(f"{kept},requests=5\n{new}\nhalf of a li")
    keys_of_file.refresh()
    assert keys_of_file.not_followed
    assert tenants.of(thief) is not None, "it may be on its way yet"
    now = SETTLED_S
    keys_of_file.refresh()
    assert [tenants.of(each) is not None for each in (alice, thief, "new")] == [True, False, False]
    path.write_text(f"{kept}\n{new}\n")
    keys_of_file.refresh()
    assert [tenants.of(each) is not None for each in (alice, thief, "new")] == [True, False, True]
    assert not keys_of_file.not_followed
    path.unlink()
    keys_of_file.refresh()
    assert tenants.of(alice) is not None, "of one that is not there nothing is known"
    path.write_text("")
    keys_of_file.refresh()
    assert tenants.of(alice) is None


def test_of_keys_made_at_once_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "api_keys"
    path.write_text("# written by hand\n")
    with ThreadPoolExecutor(6) as threads:
        secrets = list(threads.map(lambda number: _made(path, f"t{number}"), range(12)))
    tenants = Tenants(read(path), 8)
    assert all(tenants.of(secret) is not None for secret in secrets)
    assert path.read_text().startswith("# written by hand\n")


def _made(path: Path, name: str) -> str:
    made = subprocess.run(
        [sys.executable, "-m", "mooncake_zmq", "keys", "api", name, "--in", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.strip()


def test_a_key_that_gateways_would_not_read_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "api_keys"
    before = "".join(f"t{number}:{digest_of(str(number))}\n" for number in range(MAX_TENANTS))
    path.write_text(before)
    path.chmod(0o644)
    refused = run("api", "one-more", "--in", path)
    assert (refused.exit_code, "more than" in refused.output) == (2, True)
    assert path.read_text() == before


def test_a_rotation_that_is_interrupted_is_finished_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(key_files, "_finish", lambda *_: None)  # as if it had ended before
        assert run("rotate", "a", "--in", directory).exit_code == 0
    newest, former = run("show", "a", "--in", directory).output.split()
    assert key_files.load(directory, "a").public == former
    assert run("drop", "a", "--in", directory).exit_code == 0
    assert key_files.load(directory, "a").public == newest


def test_a_secret_whose_public_key_was_never_written_is_removed(tmp_path: Path) -> None:
    directory = made(tmp_path)
    before = (directory / "a.secret").read_bytes()
    (directory / f"a{key_files.NEW_SECRET}").write_bytes(zmq.curve_keypair()[1])
    assert run("drop", "a", "--in", directory).exit_code == 0
    assert (directory / "a.secret").read_bytes() == before
    assert not list(directory.glob(f"*{key_files.NEW_SECRET}"))


def test_a_directory_that_others_may_read_stays_so_and_one_that_they_may_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    directory.mkdir()
    directory.chmod(0o755)
    made(tmp_path)
    assert directory.stat().st_mode & 0o777 == 0o755
    directory.chmod(0o777)
    refused = run("make", "--to", directory, "--store", "x")
    assert f"{directory}: others can write into it" in refused.output
