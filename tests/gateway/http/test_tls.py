"""A gateway's certificate on disk: what cannot be used is told in a line, and a change is followed once it is whole."""

import certificates
import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.config.load import load
from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.gateway.http import tls
from mooncake_zmq.gateway.http.tls import Tls, TlsFiles, presented, tls_files_of
from mooncake_zmq.operate.doctor import access
from mooncake_zmq.transfer import key_files

CONFIG = """
[gateway]
http_host = "{host}"
{more}
[[nodes]]
name = "gw"
role = "gateway"
"""


@pytest.fixture
def files(tmp_path):
    return certificates.make(tmp_path)


def refusal(files):
    with pytest.raises(KeysError) as caught:
        tls.load(files)
    return str(caught.value)


def written(tmp_path, files, host="0.0.0.0"):
    more = f'tls_certificate = "{files.certificate}"\ntls_key = "{files.key}"' if files else ""
    path = tmp_path / "cluster.toml"
    path.write_text(CONFIG.format(host=host, more=more))
    return path


def test_what_cannot_be_used_is_told_in_a_line(files, tmp_path):
    other = certificates.make(tmp_path, "other")
    assert "the key is not that of the certificate" in refusal(TlsFiles(files.certificate, other.key))
    assert "no such file" in refusal(TlsFiles(tmp_path / "none.crt", files.key)).lower()
    assert "PEM" in refusal(TlsFiles(files.key, files.key))
    files.certificate.chmod(0o600)
    assert "PEM" in refusal(TlsFiles(files.certificate, files.certificate))
    assert "is encrypted" in refusal(certificates.make(tmp_path, "locked", password=b"secret"))
    assert "no regular file" in refusal(TlsFiles(tmp_path, files.key))


def test_a_key_that_everybody_may_read_or_change_is_refused(files):
    for mode, said in ((0o604, "everybody can read it"), (0o620, "others can write it"), (0o602, "others can write it")):
        files.key.chmod(mode)
        assert said in refusal(files)
        tls.load(TlsFiles(files.certificate, files.key, given=True))  # systemd's ACLs show as such permissions
    for mode in (0o400, 0o600, 0o640):
        files.key.chmod(mode)
        tls.load(files)
    files.certificate.chmod(0o666)
    assert "others can write it" in refusal(files)


def test_a_change_is_followed_once_both_files_fit(files, tmp_path):
    live = Tls(files)
    first = live.context
    live.refresh()
    assert live.context is first
    other = certificates.make(tmp_path, "other")
    files.certificate.write_bytes(other.certificate.read_bytes())
    live.refresh()
    assert live.context is first
    files.key.write_bytes(other.key.read_bytes())
    live.refresh()
    assert live.context is not first
    second = live.context
    files.key.unlink()
    live.refresh()
    assert live.context is second


def test_what_clients_would_see_is_known_beforehand(files, tmp_path):
    shown = presented(files)
    assert shown.names == ("localhost",)
    assert tls.days_left(shown.until, shown.until - 86_400 * 3.5) == 3
    with pytest.raises(KeysError, match="expired"):
        presented(certificates.make(tmp_path, "old", days=-1))


def test_they_are_the_units_credentials_where_the_file_says_nothing(files, tmp_path, monkeypatch):
    assert tls_files_of("", "") is None
    given = tmp_path / "credentials"
    given.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    (given / tls.KEY_CREDENTIAL).write_bytes(files.key.read_bytes())
    with pytest.raises(KeysError, match="give it both"):
        tls_files_of("", "")
    checked = CliRunner().invoke(main, ["config", "check", str(written(tmp_path, None))])
    assert (checked.exit_code, "give it both" in checked.output) == (2, True)
    (given / tls.CERTIFICATE_CREDENTIAL).write_bytes(files.certificate.read_bytes())
    found = tls_files_of("", "")
    assert found is not None
    assert found.given
    presented(found)


def test_one_file_without_the_other_is_the_operators_mistake(files, tmp_path):
    path = tmp_path / "half.toml"
    path.write_text(CONFIG.format(host="127.0.0.1", more=f'tls_key = "{files.key}"'))
    found = CliRunner().invoke(main, ["config", "check", str(path)])
    assert found.exit_code == 2
    assert "tls_certificate and tls_key go together" in found.output


def test_config_check_and_doctor_tell_what_is_open_and_what_expires(files, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_ZMQ_GATEWAY__ALLOW_OPEN", "true")

    def warned(chosen, host="0.0.0.0"):
        return CliRunner().invoke(main, ["config", "check", str(written(tmp_path, chosen, host))]).output

    def examined(chosen, host="0.0.0.0"):
        loaded = load(written(tmp_path, chosen, host))
        here = access.Here(loaded, loaded.config.nodes, {})
        return [each.level for each in access.examine(here)]

    assert "http://0.0.0.0" in warned(None)
    assert "go in clear" in warned(None)
    assert "every client that reaches it may call it" in warned(None)
    assert "go in clear" not in warned(None, "127.0.0.1")
    assert "https://0.0.0.0" in warned(files)
    assert "go in clear" not in warned(files)
    soon = certificates.make(tmp_path, "soon", days=3)
    assert "expires in" in warned(soon)
    assert "the key is not that of the certificate" in warned(TlsFiles(files.certificate, soon.key))
    assert examined(None) == ["warning", "warning"]
    assert examined(None, "127.0.0.1") == ["warning", "ok"]
    assert examined(files) == ["warning", "ok"]
    assert examined(soon) == ["warning", "warning"]
    assert examined(TlsFiles(files.certificate, soon.key)) == ["warning", "problem"]


def test_the_doctor_tells_of_tenants_clients_without_a_key(tmp_path):
    path, keys = tmp_path / "cluster.toml", tmp_path / "keys"
    tenant = '[[cache_node.objects.tenants]]\nname = "red"\nnamespaces = ["red/"]\nclients = ["ruby"]\n'
    node = '[[nodes]]\nname = "pool"\nrole = "cache-node"\nstore_endpoint = "tcp://127.0.0.1:7300"\n'
    path.write_text(f'[security]\nkeys = "{keys}"\n{tenant}{node}')

    def levels():
        loaded = load(path)
        return [each.level for each in access.examine(access.Here(loaded, loaded.config.nodes, {}))]

    key_files.make(keys, [("pool", ("node",)), ("ruby", ("events",))])
    assert levels() == ["ok", "warning"]
    key_files.make(keys, [("sky", ("store",))])
    assert levels() == ["ok", "warning"]
    path.write_text(path.read_text().replace("ruby", "sky"))
    assert levels() == ["ok", "ok"]
    (keys / "pool.secret").chmod(0o644)
    assert levels() == ["problem", "ok"]
    (keys / "pool.secret").unlink()
    assert [access.node_key(keys, name, True).level for name in ("pool", "other")] == ["ok", "problem"]
    assert access.node_key(keys, "pool", False).level == "problem"
    assert access.node_key(tmp_path / "none", "pool", True).level == "problem"
