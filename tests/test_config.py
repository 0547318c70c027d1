"""Reading, precedence, and errors that say where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.config import warnings as config_warnings
from mooncake_zmq.config import warnings as warnings_module
from mooncake_zmq.config.checks import check_local_reads, check_open
from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import effective, load, load_text
from mooncake_zmq.config.ports import ports
from mooncake_zmq.config.summary import summary
from mooncake_zmq.config.warnings import warnings
from mooncake_zmq.core.messages import MAX_LENDERS

ROOT = Path(__file__).parent.parent
NODES = """
[[nodes]]
name = "c"
role = "conductor"

[[nodes]]
name = "d"
role = "decode"
"""


MODELS = ROOT / "configs" / "vllm-models.toml"


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, nodes: str = NODES) -> Path:
        path = tmp_path / "x.toml"
        path.write_text(text + nodes)
        return path

    return write_file


def fails(path: Path, overrides: dict[str, Any] | None = None, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, environment or {})
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "x.toml")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.toml")))
def test_the_shipped_files_are_sound(name: str) -> None:
    loaded = load(ROOT / "configs" / name, environment={})
    assert list(summary(loaded))
    # Of this machine; of keys and certificates, which are the operator's to make; of stores that are there for strangers.
    expected = ("threads", "without gateway.", "its store", "No such file", "needs CuPy")
    assert not [text for text in warnings(loaded) if not any(words in text for words in expected)]


def test_spans_without_the_extra_for_them_are_warned_of(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "[gateway]\notlp_endpoint = 'http://collector:4318'\n"
    loaded = load(write(told, "[[nodes]]\nname = 'g'\nrole = 'gateway'\n"), {}, {})
    for installed in (True, False):
        monkeypatch.setattr(warnings_module, "is_installed", lambda installed=installed: installed)
        assert any("needs the extra otel" in text for text in warnings(loaded)) == (not installed)


def test_command_line_beats_environment_beats_file_beats_default(write: Any) -> None:
    path = write("[decode]\nmax_batch = 3\n")
    variable = {"MOONCAKE_ZMQ_DECODE__MAX_BATCH": "4"}
    setting = {"decode.max_batch": "5"}
    assert load(path, {}, {}).config.decode.max_batch == 3
    assert load(path, {}, variable).config.decode.max_batch == 4
    loaded = load(path, setting, variable)
    assert loaded.config.decode.max_batch == 5
    sources = {dotted: source for dotted, _, source in effective(loaded)}
    assert sources["decode.max_batch"] == "command line"
    assert sources["decode.max_requests"] == "default"
    assert sources["nodes[1].role"] == "file"


def test_nested_sections_and_text_values_can_be_overridden(write: Any) -> None:
    environment = {"MOONCAKE_ZMQ_PREFILL__POOL__LEASE_TTL_S": "12", "MOONCAKE_ZMQ_MODEL__PATH": "42"}
    config = load(write("[prefill.pool]\nfetch_s = 2\n"), {}, environment).config
    assert (config.prefill.pool.lease_ttl_s, config.prefill.pool.fetch_s) == (12, 2)
    assert config.model.path == "42"
    assert load(write(""), {"cluster.log_format": "console"}, {}).config.cluster.log_format == "console"


def test_a_node_may_replace_keys_of_its_role(write: Any) -> None:
    loaded = load(write("[decode]\nmax_batch = 3\nmax_requests = 9\n", NODES + "settings = { max_batch = 7 }\n"), {}, {})
    section = loaded.section(loaded.config.node("d"))
    assert (section.max_batch, section.max_requests) == (7, 9)
    assert loaded.config.decode.max_batch == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[decode]\nmax_batch = 'x'\n", "x.toml: decode.max_batch: expected int, got str"),
        (
            "[decode]\nmax_batsh = 1\n",
            "x.toml: decode.max_batsh: unknown key; did you mean max_batch?; known here: borrow, capacity_tokens",
        ),
        ("[deocde]\n", "x.toml: deocde: unknown key"),
        ("[gateway.requests]\nmax_open = 9\n", "x.toml: gateway: edge.max_choices must not exceed requests.max_open"),
        ("[gateway]\ncors_origins = ['chat.example.org']\n", "cors_origins: 'chat.example.org' is no origin: write SCHEME://"),
        (
            "[gateway]\notlp_endpoint = 'collector:4318'\n",
            "otlp_endpoint: 'collector:4318' is no URL of a collector: write http://",
        ),
        ("[gateway]\ncors_origins = ['https://a.b/chat']\n", "cors_origins: 'https://a.b/chat' is no origin"),
        ("[prefill.pool]\nnothing = 1\n", "x.toml: prefill.pool.nothing: unknown key"),
        ("decode = 3\n", "x.toml: decode: expected object, got int"),
        ("[decode]\nmax_requests = 0\n", "x.toml: decode: capacity_tokens and max_requests must be at least 1"),
        ("[session]\nheartbeat_s = 2.0\n", "x.toml: session: peer_timeout_s must be at least 3 * heartbeat_s"),
        ("[prefill.pool]\nlease_ttl_s = 2.0\nfetch_s = 1\n", "prefill.pool.lease_ttl_s must be above session.peer_timeout_s"),
        ("[decode.pool]\nlease_ttl_s = 90.0\n", "decode.pool.lease_ttl_s must be at most cache_node.max_lease_s"),
        ("[prefill]\nchunk_tokens = 500\n", "x.toml: prefill.chunk_tokens must be a multiple of model.block_tokens, 32"),
        ("[cluster]\nname = 'a b'\n", "x.toml: cluster: name must be"),
        ("[cluster]\nruntime_dir = 'here'\n", "x.toml: cluster: runtime_dir and shm_dir must be absolute paths"),
        (f"[cluster]\nruntime_dir = '/{'r' * 100}'\n", "the path is longer than 100 bytes; use a shorter runtime_dir"),
        ("[cluster]\nlog_level = 'loud'\n", "log_level must be one of debug, info"),
        ("[model]\nname = 'a b'\n", "x.toml: model: name must be printable text without spaces, of at most 256 characters"),
        ('[model]\nname = "a\\n"\n', "x.toml: model: name must be printable text without spaces"),
        (f"[model]\nname = '{'a' * 257}'\n", "x.toml: model: name must be printable text without spaces"),
        ("[model]\nblock_tokens = 0\n", "block_tokens must be between"),
        ("[model]\nblock_tokens = 1\nmax_model_len = 65537\n", "x.toml: model: max_model_len must be at most 65536"),
        ("[gateway]\nhttp_port = 70000\n", "x.toml: gateway: http_port must be between 1 and 65535"),
        ("a = [\n", "x.toml: not TOML"),
    ],
)
def test_errors_name_file_and_path(write: Any, text: str, message: str) -> None:
    assert message in fails(write(text))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (NODES + "port = 3\n", "x.toml: nodes[1].port: unknown key"),
        (NODES + "threads = 'x'\n", "x.toml: nodes[1].threads: expected int, got str"),
        (NODES + "threads = 0\n", "x.toml: nodes[1]: threads must be between"),
        (NODES + "settings = { max_batsh = 1 }\n", "x.toml: nodes[1].settings.max_batsh: unknown key"),
        (NODES + "settings = { max_batch = 'x' }\n", "x.toml: nodes[1].settings.max_batch: expected int, got str"),
        (
            NODES + "settings = { pool = { lease_ttl_s = 90.0 } }\n",
            "x.toml: nodes[1].settings: decode.pool.lease_ttl_s must be at most cache_node.max_lease_s",
        ),
        (NODES + "data_endpoint = 'tcp://x:1'\n", "tcp://x:1: write tcp://ADDRESS:PORT with an IPv4 address"),
        (NODES + "endpoint = 'udp://x'\n", "udp://x: an endpoint begins with ipc:// or tcp://"),
        (NODES.replace('"d"', '"c"'), "nodes: the name c is given twice"),
        (NODES.replace("decode", "decoder"), "x.toml: nodes[1].role: invalid enum value 'decoder'"),
        (NODES.replace('"d"', '"../d"'), "x.toml: nodes[1]: name must be"),
        (NODES.replace('role = "decode"', ""), "missing required field role"),
        ("[[nodes]]\nname='a'\nrole='cache-node'\n[[nodes]]\nname='b'\nrole='cache-node'\n", "has two cache-nodes"),
    ],
)
def test_errors_of_nodes(write: Any, nodes: str, message: str) -> None:
    assert message in fails(write("", nodes))


def test_errors_of_environment_and_command_line_name_them(write: Any) -> None:
    path = write("")
    variable = "MOONCAKE_ZMQ_DECODE__MAX_BATCH"
    assert (
        fails(path, {}, {variable: "x"}) == f"environment {variable}: decode.max_batch: cannot read 'x'; an integer is wanted"
    )
    assert fails(path, {}, {variable: "1.5"}) == f"environment {variable}: decode.max_batch: expected int, got float"
    assert (
        fails(path, {}, {"MOONCAKE_ZMQ_DECODE__X": "1"}) == "environment MOONCAKE_ZMQ_DECODE__X: there is no setting decode.x"
    )
    assert fails(path, {"decode": "1"}) == "command line: there is no setting decode"
    assert fails(path, {"nodes": "[]"}) == "command line: there is no setting nodes"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("prefill.chunk_token=32", "there is no setting prefill.chunk_token; did you mean chunk_tokens?"),
        ("cache_node.pool_bytes=lots", "cannot read 'lots'; an integer of bytes or a size like 512MiB is wanted"),
        ("model.path=1GiB", ""),
    ],
)
def test_errors_say_what_was_meant_or_is_wanted(write: Any, setting: str, message: str) -> None:
    key, _, value = setting.partition("=")
    if key == "model.path":
        assert load(write(""), {key: value}, {}).config.model.path == value  # a size stays text where text is wanted
    else:
        assert message in fails(write(""), {key: value})


def test_a_word_that_is_none_of_the_known_ones_is_answered_with_them(write: Any) -> None:
    message = fails(write("", NODES.replace('"decode"', '"decod"')))
    assert "invalid enum value 'decod'; it is one of conductor, prefill, decode" in message


@pytest.mark.parametrize(
    ("size", "bytes_"), [("1GiB", 1 << 30), ("1.5MiB", 3 << 19), ("2 GB", 2 * 10**9), ("512kib", 1 << 19), ("65536", 1 << 16)]
)
def test_sizes_are_bytes_with_a_unit_or_without(write: Any, size: str, bytes_: int) -> None:
    assert load(write(""), {"cache_node.pool_bytes": size}, {}).config.cache_node.pool_bytes == bytes_
    if not size.isdigit():
        assert load(write(f'[cache_node]\npool_bytes = "{size}"\n'), {}, {}).config.cache_node.pool_bytes == bytes_


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert fails(tmp_path / "none.toml").endswith("x.toml: No such file or directory")


def test_more_engine_threads_than_cores_is_a_warning(write: Any) -> None:
    loaded = load(write("", NODES + "threads = 900\n"), {}, {})
    assert any("900 threads" in text for text in warnings(loaded))
    apart = NODES + "threads = 900\nendpoint = 'tcp://10.0.0.1:7000'\n"
    apart += "[[nodes]]\nname = 'far'\nrole = 'decode'\nthreads = 700\nendpoint = 'tcp://10.0.0.2:7000'\n"
    assert any("900 threads" in text for text in warnings(load(write("", apart), {}, {}))), (
        "those of another machine do not count"
    )
    assert any("there is no prefill" in text for text in warnings(loaded))
    loaded = load(write("[gateway]\ncors_origins = ['*']\n", "[[nodes]]\nname = 'g'\nrole = 'gateway'\n"), {}, {})
    assert any("g: cors_origins is * and there are no API keys" in text for text in warnings(loaded))


@pytest.mark.parametrize(
    ("setting", "role"),
    [("cache_node.pool_bytes", "cache-node"), ("cache_node.ssd.bytes", "cache-node"), ("prefill.slab_bytes", "prefill")],
)
def test_room_for_less_than_a_block_is_a_warning(write: Any, setting: str, role: str) -> None:
    path = write("[cache_node.ssd]\ndirectory = '/kv'\n", f"[[nodes]]\nname = 'n'\nrole = '{role}'\n")
    warned = f"n: {setting.partition('.')[2]} = 10 holds no block of 32 tokens"
    assert any(warned in text for text in warnings(load(path, {setting: "10"}, {})))
    assert not any("holds no block" in text for text in warnings(load(path, {setting: "10MiB"}, {})))


def test_addresses_beyond_the_machine_without_keys_are_a_warning(write: Any) -> None:
    path = write("", NODES + "endpoint = 'tcp://10.1.2.3:7000'\n")
    assert any("no keys, so it will not start: tcp://10.1.2.3:7000" in text for text in warnings(load(path, {}, {})))
    for told in ({"security.allow_plain_tcp": "true"}, {"security.keys": "/keys"}):
        assert not any("no keys" in text for text in warnings(load(path, told, {})))


OPEN = "[gateway]\nhttp_host = '10.1.2.3'\n%s\n[[nodes]]\nname = 'g'\nrole = 'gateway'\n"


def test_a_gateway_that_everybody_could_call_is_refused_unless_it_says_so(tmp_path: Path) -> None:
    def checked(line: str) -> Any:
        path = tmp_path / "open.toml"
        path.write_text(OPEN % line)
        return CliRunner().invoke(main, ["config", "check", str(path)])

    refused = checked("")
    assert refused.exit_code == 2
    assert "g: http_host 10.1.2.3 is not loopback, and there are no API keys: gateway.api_keys = FILE" in refused.output
    assert "gateway.allow_open = true" in refused.output
    for line in ("allow_open = true", "api_keys = '/etc/keys'"):
        assert checked(line).exit_code == 0


@pytest.mark.parametrize("name", ["two-hosts", "four-hosts"])
def test_the_examples_beyond_one_machine_ask_for_keys_and_speak_tls(name: str) -> None:
    loaded = load(ROOT / f"configs/{name}.toml", {}, {})
    for node in loaded.config.of_role("gateway"):
        section = loaded.section(node)
        assert section.api_keys
        assert section.tls_certificate
        assert not section.allow_open


def test_metrics_beyond_the_machine_are_refused_unless_a_setting_says_so(write: Any) -> None:
    path = write("", NODES + "metrics_host = '10.1.2.3'\nmetrics_port = 9101\n")
    loaded = load(path, {}, {})
    with pytest.raises(ConfigError, match=r"metrics_host 10\.1\.2\.3 is not loopback.*security\.allow_open_metrics = true"):
        check_open(loaded, loaded.config.nodes)
    opened = load(path, {"security.allow_open_metrics": "true"}, {})
    check_open(opened, opened.config.nodes)
    assert any("every client that reaches 10.1.2.3 sees its metrics" in text for text in warnings(opened))


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_machine_that_reorders_loads_does_not_read_shared_memory_unchecked(
    write: Any, monkeypatch: pytest.MonkeyPatch, machine: str, role: str
) -> None:
    path = write(f"[{role}.pool]\nverify_local = false\n", NODES + "may_become = 'prefill'\n")
    loaded = load(path, {}, {})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    check_local_reads(loaded, loaded.config.nodes)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(ConfigError, match=rf"d: {role}\.pool\.verify_local = false needs a CPU .* on {machine} only checksums"):
        check_local_reads(loaded, loaded.config.nodes)
    assert CliRunner().invoke(main, ["config", "check", str(path)]).exit_code == 2
    checked = load(path, {f"{role}.pool.verify_local": "true"}, {})
    check_local_reads(checked, checked.config.nodes)


OF_A_KIB = 'dummy:{"layers": 2, "kv_heads": 4, "head_dim": 16, "heads": 4}'
"""A model whose KV takes 1,024 bytes a token."""


def test_the_summary_counts_the_kv_of_running_prompts(write: Any) -> None:
    text = (
        f"[model]\npath = '{OF_A_KIB}'\nmax_model_len = 1024\n"
        "[prefill]\nmax_active = 3\nshort_jobs = 1\nchunk_tokens = 256\nslab_bytes = 1048576\n"
    )
    loaded = load(write(text, '[[nodes]]\nname = "p"\nrole = "prefill"\n'), {}, {})
    lines = list(summary(loaded))
    assert "slab of 1 MiB, KV of running prompts 3 MiB" in lines[2]
    assert "at most 4 MiB" in lines[-1]


@pytest.mark.parametrize("role", ["conductor", "cache-node", "gateway"])
def test_only_prefills_and_decodes_compute_with_another_backend(write: Any, role: str) -> None:
    nodes = f'\n[[nodes]]\nname = "odd"\nrole = "{role}"\nbackend = "compiled"\n'
    assert f"odd: backend 'compiled' is for prefill and decode nodes, and this is a {role}" in fails(write("", nodes))


def test_the_model_is_prepared_for_any_node_that_computes_with_another_backend(write: Any) -> None:
    assert load(write(""), {}, {}).config.backend == "auto"
    another = '\n[[nodes]]\nname = "d2"\nrole = "decode"\nbackend = "compiled"\n'
    assert load(write("", NODES + another), {}, {}).config.backend == "compiled"
    numpy = NODES.replace('role = "decode"', 'role = "decode"\nbackend = "numpy"')
    numpy = numpy.replace('role = "prefill"', 'role = "prefill"\nbackend = "numpy"')
    assert load(write("", numpy), {}, {}).config.backend == "numpy"


MODELLED = '\n[[nodes]]\nname = "m"\nrole = "prefill"\nbackend = "modelled:%s"\nthreads = 512\n'


def test_a_modelled_engine_holds_no_weights_and_takes_no_cores(write: Any) -> None:
    loaded = load(write("", NODES + MODELLED % "a800-llama3-70b"), {}, {})
    node = loaded.config.node("m")
    assert (node.modelled, node.computes, node.prepared_for) == ("a800-llama3-70b", False, "numpy")
    assert not any("512" in warning for warning in warnings(loaded))
    assert any(line.endswith(", modelled:a800-llama3-70b") for line in summary(loaded))


@pytest.mark.parametrize("backend", ["modelled", "modelled:", "vectors"])
def test_a_backend_that_is_none_is_told(write: Any, backend: str) -> None:
    nodes = f'\n[[nodes]]\nname = "odd"\nrole = "decode"\nbackend = "{backend}"\n'
    assert f"odd: backend '{backend}' is none of auto, numpy, compiled, modelled:PROFILE" in fails(write("", nodes))


def test_a_modelled_engines_profile_must_be_there(write: Any) -> None:
    assert "nodes[0].backend: nowhere.json: No such file" in fails(write("", MODELLED % "nowhere.json"))


def test_costs_may_be_those_of_named_hardware_and_yield_to_the_file(write: Any) -> None:
    text = '[costs]\nprofile = "a800-llama3-70b"\ndecode_step_s = 0.5\n'
    loaded = load(write(text), {}, {})
    assert loaded.config.costs.prefill_token_s == 1.147e-4
    assert loaded.config.costs.decode_step_s == 0.5
    assert loaded.sources["costs.prefill_token_s"] == "profile a800-llama3-70b"
    assert not any("a800" in warning for warning in warnings(loaded))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('role = "cache-node"', "odd: device 'cuda' is for prefill and decode nodes, and this is a cache-node"),
        ('role = "decode"\nbackend = "compiled"', "odd: device 'cuda' needs backend 'numpy'; 'compiled' computes on the CPU"),
        ('role = "prefill"\nthreads = 2', "odd: device 'cuda' computes from one thread; leave threads at 1"),
    ],
)
def test_a_device_computes_for_prefills_and_decodes_in_one_thread_of_the_numpy_engine(
    write: Any, setting: str, said: str
) -> None:
    assert said in fails(write("", f'\n[[nodes]]\nname = "odd"\ndevice = "cuda"\n{setting}\n'))


def test_the_toy_model_has_no_device(write: Any) -> None:
    nodes = '\n[[nodes]]\nname = "p"\nrole = "prefill"\ndevice = "cuda"\n'
    assert "the toy model computes on the CPU alone" in fails(write('[model]\npath = "toy"\n', nodes))


def test_an_unknown_device_is_refused(write: Any) -> None:
    assert "nodes[0].device: invalid enum value 'tpu'" in fails(
        write("", '[[nodes]]\nname = "p"\nrole = "prefill"\ndevice = "tpu"\n')
    )


def test_a_device_that_this_machine_lacks_is_a_warning_as_the_file_may_be_for_another(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(device: str) -> None:
        if device == "cuda":
            raise ValueError("device 'cuda' needs CuPy and a GPU")

    monkeypatch.setattr(config_warnings, "array_namespace", lacking)
    nodes = NODES + '[[nodes]]\nname = "p"\nrole = "prefill"\ndevice = "cuda"\n'
    config = load(write("", nodes), {}, {}).config
    assert list(config_warnings.device_warnings(config.nodes[:2])) == []
    (said,) = config_warnings.device_warnings(config.nodes)
    assert said.startswith("p: device 'cuda' needs CuPy and a GPU; on the node's own machine 'mooncake-zmq doctor'")


def test_the_summary_says_how_blocks_hold_kv(write: Any) -> None:
    for codec, said in {
        "exact": "exactly: 46,080 bytes a token of a model such as the default one",
        "int8": "as int8: 11,880 bytes a token of a model such as the default one (46,080 exactly)",
        "int4": "as int4: 6,120 bytes a token of a model such as the default one (46,080 exactly)",
    }.items():
        loaded = load(write(f"[model]\nkv_codec = '{codec}'\npath = '/none.gguf'\n", NODES), {}, {})
        assert list(summary(loaded))[1] == f"  blocks hold KV {said}"
        assert any(text.startswith("model.path: /none.gguf does not exist") for text in warnings(loaded))
    assert "blocks hold KV" not in "".join(summary(load(ROOT / "configs" / "vllm.toml", {}, {})))


def test_the_summary_has_the_sizes_of_a_model_that_is_not_prepared_yet(write: Any) -> None:
    shape = 'dummy:{"layers": 2, "kv_heads": 3, "head_dim": 16, "heads": 3, "max_positions": 1024}'
    nodes = "".join(f"[[nodes]]\nname = '{role}'\nrole = '{role}'\n" for role in ("prefill", "decode"))
    loaded = load(write(f"[model]\npath = '{shape}'\n", nodes), {"decode.capacity_tokens": "65536"}, {})
    kv, prefill, decode = list(summary(loaded))[1:4]
    assert "768 bytes a token" in kv
    assert "KV of running prompts 4 MiB" in prefill, "four of the model's longest context and two chunks"
    assert "KV of 65,536 tokens, 48 MiB" in decode


@pytest.mark.parametrize(
    ("model", "node", "why"),
    [
        ("path = 'toy'", "", "toy engine computes with whole numbers"),
        ("", "device = 'cuda'", "compute on a CPU: node p has device 'cuda'"),
        ("", "backend = 'modelled:a800-llama3-70b'", "a modelled engine"),
    ],
)
def test_a_codec_is_for_engines_that_keep_it(write: Any, model: str, node: str, why: str) -> None:
    text = f"[model]\nkv_codec = 'int8'\n{model}\n"
    with pytest.raises(ConfigError, match=why):
        load(write(text, NODES + f"[[nodes]]\nname = 'p'\nrole = 'prefill'\n{node}\n"), {}, {})


@pytest.mark.parametrize(
    ("model", "node", "why"),
    [
        ("path = 'toy'", "", "the toy engine attends to nothing"),
        ("kv_codec = 'int8'", "", "model.kv_codec is 'int8'"),
        ("", "device = 'cuda'", "node d has device 'cuda'"),
        ("", "backend = 'modelled:a800-llama3-70b'", "node d has a modelled engine"),
    ],
)
def test_selection_is_for_exact_kv_on_a_cpu(write: Any, model: str, node: str, why: str) -> None:
    text = f"[model]\n{model}\n[[nodes]]\nname = 'd'\nrole = 'decode'\nsettings = {{ selection = 'kcache' }}\n{node}\n"
    with pytest.raises(ConfigError, match=f"our own engine computes on a CPU: {why}"):
        load(write(text, ""), {}, {})
    load(write(text.replace("kcache", "none"), ""), {}, {})


def test_the_summary_counts_what_selection_copies(write: Any) -> None:
    text = "[decode]\nselection = 'quest'\n[[nodes]]\nname = 'd'\nrole = 'decode'\n"
    assert "half of it for selection = 'quest'" in "".join(summary(load(write(text, ""), {}, {})))


def test_the_summary_counts_gpu_memory_by_itself(write: Any) -> None:
    text = (
        f"[model]\npath = '{OF_A_KIB}'\nmax_model_len = 1024\n"
        "[prefill]\nmax_active = 3\nshort_jobs = 1\nchunk_tokens = 256\nslab_bytes = 1048576\n"
    )
    node = '[[nodes]]\nname = "p"\nrole = "prefill"\ndevice = "cuda"\n'
    lines = list(summary(load(write(text, node), {}, {})))
    assert lines[2].endswith("KV of running prompts 3 MiB, cuda, numpy")
    assert "at most 0 MiB of RAM" in lines[-2]
    assert lines[-1].startswith("and 4 MiB of GPU memory")


CHANGING = """
[[nodes]]
name = "p"
role = "prefill"
may_become = "decode"
settings = { max_queued = 7 }
"""


def test_a_node_that_may_change_has_the_other_roles_section_then(write: Any) -> None:
    loaded = load(write("[decode]\nmax_batch = 3\n", NODES + CHANGING), {}, {})
    node = loaded.config.node("p")
    assert node.roles == ("prefill", "decode")
    assert loaded.section(node).max_queued == 7
    other = node.in_role("decode")
    assert (other.role, other.may_become, other.roles) == ("decode", "prefill", ("decode", "prefill"))
    assert loaded.section(other).max_batch == 3
    assert any("may become a decode" in line for line in summary(loaded))


@pytest.mark.parametrize(("role", "other"), [("prefill", "prefill"), ("decode", "cache-node"), ("gateway", "prefill")])
def test_only_prefill_and_decode_become_each_other(write: Any, role: str, other: str) -> None:
    nodes = f'\n[[nodes]]\nname = "odd"\nrole = "{role}"\nmay_become = "{other}"\n'
    assert f"odd: a {role} cannot become a {other}" in fails(write("", nodes))


TENANTS = """
[[cache_node.objects.tenants]]
name = "team-a"
namespaces = ["team-a/"]
clients = ["vllm-1", "vllm-2"]
readers = ["dashboard"]
dram_bytes = 1_000_000
[[cache_node.objects.tenants]]
name = "team-b"
namespaces = ["team-b/"]
{more}
[[nodes]]
name = "pool"
role = "cache-node"
store_endpoint = "tcp://127.0.0.1:7300"
"""


def test_tenants_of_a_store_are_a_list_of_tables_whose_keys_are_known(write: Any) -> None:
    loaded = load(write(TENANTS.format(more="")), environment={})
    team_a, team_b = loaded.section(loaded.config.nodes[0]).objects.tenants
    assert (team_a.clients, team_a.readers, team_a.dram_bytes) == (("vllm-1", "vllm-2"), ("dashboard",), 1_000_000)
    assert team_b.clients == ()
    assert any("for team-a, team-b" in line for line in summary(loaded))
    assert any("none has access" in line for line in warnings(loaded))


@pytest.mark.parametrize(("quota", "promised"), [(8_000_000_000, True), (9_000_000_000, False)])
def test_disk_quotas_that_are_no_promise_are_told(write: Any, quota: int, promised: bool) -> None:
    ssd = '[cache_node.objects.ssd]\ndirectory = "/ssd"\n'
    loaded = load(write(ssd + TENANTS.format(more=f"ssd_bytes = {quota}")), environment={})
    assert any("may push out" in line for line in warnings(loaded)) is not promised


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("quota = 1", "cache_node.objects.tenants[1].quota: unknown key"),
        ('namespaces = ["team-a/x"]', "a key belongs to one namespace"),
        ("dram_bytes = -1", "at least 0"),
    ],
)
def test_a_tenant_that_cannot_be_followed_is_the_operators_mistake(write: Any, more: str, said: str) -> None:
    text = TENANTS.format(more=more)
    text = text.replace('namespaces = ["team-b/"]\n', "") if "namespaces" in more else text
    with pytest.raises(ConfigError) as caught:
        load(write(text), environment={})
    assert said in str(caught.value)


SHARES = """
[cache_node]
pool_bytes = 1_000_000
ssd = {{ directory = "/ssd", bytes = 4_000_000 }}
[[cache_node.tenants]]
name = "alice"
dram_bytes = 600_000
ssd_bytes = 4_000_000
[[cache_node.tenants]]
name = "bob"
{more}
[[nodes]]
name = "pool"
role = "cache-node"
"""


def test_shares_of_a_pool_are_a_list_of_tables(write: Any) -> None:
    loaded = load(write(SHARES.format(more="dram_bytes = 400_000")), environment={})
    alice, bob = loaded.section(loaded.config.nodes[0]).tenants
    assert (alice.name, alice.dram_bytes, alice.ssd_bytes) == ("alice", 600_000, 4_000_000)
    assert (bob.dram_bytes, bob.ssd_bytes) == (400_000, 0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("dram_bytes = 400_001", "dram_bytes are more than pool_bytes"),
        ("ssd_bytes = 1", "ssd_bytes are more than ssd.bytes"),
        ("dram_bytes = -1", "at least 0"),
        ("share = 1", "cache_node.tenants[1].share: unknown key"),
        ('[[cache_node.tenants]]\nname = "alice"', "alice is there twice"),
        ('[[cache_node.tenants]]\nname = "a b"', "is no name"),
    ],
)
def test_shares_that_cannot_be_kept_are_the_operators_mistake(write: Any, more: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(SHARES.format(more=more)), environment={})
    assert said in str(caught.value)


TWO_GATEWAYS = """
[[nodes]]
name = "g"
role = "gateway"

[[nodes]]
name = "h"
role = "gateway"
"""


def test_gateways_of_a_host_have_addresses_of_their_own_or_all_share_one(write: Any) -> None:
    told = fails(write("", TWO_GATEWAYS))
    assert told.startswith("x.toml: g and h listen on 127.0.0.1:8000 of localhost")
    assert "gateway.reuse_port = true" in told
    load(write("[gateway]\nreuse_port = true\n", TWO_GATEWAYS), {}, {})
    load(write("", TWO_GATEWAYS + "settings = { http_port = 8001 }\n"), {}, {})
    assert "g and h listen" in fails(write("", TWO_GATEWAYS + "settings = { reuse_port = true }\n"))


def test_a_firewall_learns_every_port_and_what_to_set_where_any_is_taken(write: Any) -> None:
    node = (
        "[[nodes]]\nname = 'c'\nrole = 'cache-node'\nendpoint = 'tcp://10.0.0.1:7000'\ndata_endpoint = 'tcp://10.0.0.1:7001'\n"
        "store_endpoint = 'tcp://10.0.0.1:7002'\nstore_stream_port = 7003\nmetrics_port = 9100\n"
    )
    found = {port.what: (port.address, port.callers, port.setting) for port in ports(load(write("", node), {}, {}))}
    assert found == {
        "messages": ("10.0.0.1:7000", "nodes", ""),
        "tickets for blocks": ("10.0.0.1:7001", "nodes", ""),
        "blocks": ("10.0.0.1:any free port", "nodes", "data_stream_port"),
        "store": ("10.0.0.1:7002", "store clients", ""),
        "values": ("10.0.0.1:7003", "store clients", "store_stream_port"),
        "metrics": ("127.0.0.1:9100", "Prometheus", ""),
    }
    assert list(ports(load(write("", "[[nodes]]\nname = 'd'\nrole = 'decode'\n"), {}, {}))) == []


@pytest.mark.parametrize("name", ["two-hosts", "four-hosts"])
def test_the_files_for_several_hosts_name_all_ports_and_none_twice_on_a_host(name: str) -> None:
    found = [(port.host, port.address) for port in ports(load(ROOT / f"configs/{name}.toml", {}, {}))]
    assert len(found) == len(set(found)) > 20
    assert not [address for _, address in found if address.endswith("any free port")]


@pytest.mark.parametrize("name", ["two-hosts", "four-hosts"])
def test_the_files_for_several_hosts_have_metrics_of_every_node(name: str) -> None:
    nodes = load(ROOT / f"configs/{name}.toml", {}, {}).config.nodes
    assert [node.name for node in nodes if node.role != "gateway" and not node.metrics_port] == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapters": ["poet"]}, 'adapters are for engine "vllm"'),
        ({"engine": "vllm", "adapters": ["a b"]}, "without spaces"),
        ({"engine": "vllm", "adapters": [""]}, "without spaces"),
        ({"engine": "vllm", "adapters": ["a", "a"]}, "a name is given twice"),
        ({"engine": "vllm", "name": "a", "adapters": ["a"]}, "a name is given twice"),
    ],
)
def test_adapters_have_names_of_their_own_and_a_vllm(settings, said):
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    with pytest.raises(ConfigError, match=said):
        load_text("\n".join(["[model]", *lines]), "f", environment={})


def test_each_of_several_models_is_a_deployment_with_the_shared_nodes():
    costs = {"prefill_token_s": 0.5, "profile": "a800-llama3-70b"}
    loaded = load(MODELS, {"models.small.costs": costs, "model.block_tokens": 64}, {})
    large, small = loaded.models["large"], loaded.models["small"]
    assert [node.name for node in large.config.nodes] == ["conductor-large", "cache-a", "vllm-a", "gateway-0"]
    assert [node.name for node in small.config.nodes] == ["conductor-small", "cache-a", "vllm-b", "gateway-0"]
    assert (large.config.model.max_model_len, small.config.model.max_model_len) == (4096, 2048)
    assert {each.config.model.block_tokens for each in loaded.of_each} == {64}
    assert (large.config.costs.prefill_token_s, small.config.costs.prefill_token_s) == (
        loaded.config.costs.prefill_token_s,
        0.5,
    )
    for node in loaded.config.nodes:
        own = loaded.of(node)
        assert own is (loaded if node.role in ("gateway", "cache-node") else loaded.models[node.model])
        assert own.section(own.config.node(node.name)) == loaded.section(node)
    shown = "\n".join(summary(loaded))
    assert "models large (/srv/models/large), small (/srv/models/small)" in shown
    assert "costs of a800-llama3-70b: prefill 500 ms per token" in shown
    assert "of model small" in shown
    assert ("models.small.max_model_len", 2048) in [(name, value) for name, value, _ in effective(loaded)]


def test_a_deployment_of_one_model_is_that_of_each():
    loaded = load(ROOT / "configs" / "toy.toml", {}, {})
    assert loaded.of_each == (loaded,)
    assert all(loaded.of(node) is loaded for node in loaded.config.nodes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('engine = "vllm"', 'engine = "own"', "several models need model.engine"),
        ('model = "large"\n', 'model = "huge"\n', "there is no model 'huge' in .models.; there are large, small"),
        ('model = "large"\n', "", "conductor-large: say which model this conductor is for: model is one of large, small"),
        ('model = "small"\nhost', 'model = "large"\nhost', "no vllm has model = 'small'"),
        ('role = "gateway"', 'role = "gateway"\nmodel = "large"', "a gateway is for all models: leave model out"),
        ("[models.small]", '[models.small]\nname = "x"\nadapters = ["x"]', "a name is given twice"),
        (
            "[models.small]",
            "[models.small]\nmax_modellen = 5",
            "models.small.max_modellen: unknown key; did you mean max_model_len",
        ),
        (
            "[models.small]",
            "[models.small]\ncosts = { prefil_token_s = 1.0 }",
            "models.small.costs.prefil_token_s: unknown key",
        ),
        ("[models.small]", "[models.small]\ncosts = { prefill_token_s = -1.0 }", "models.small: "),
        ("[models.small]", "[models.SMALL]", "a table's name must be"),
        ("max_model_len = 2048", 'max_model_len = "long"', "models.small.max_model_len"),
    ],
)
def test_a_mistake_in_one_of_several_models_is_one_line(tmp_path: Path, old: str, new: str, said: str):
    text = MODELS.read_text()
    assert old in text
    path = tmp_path / "models.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said) as raised:
        load(path, {}, {})
    assert "\n" not in str(raised.value)


def test_two_models_may_not_have_one_name():
    same = {"models.small.name": "chat", "models.large.name": "chat"}
    with pytest.raises(ConfigError, match="models: two of them are called 'chat'"):
        load(MODELS, same, {})


def test_a_setting_of_one_model_is_set_on_the_command_line_and_in_the_environment():
    loaded = load(MODELS, {"models.small.path": "/m"}, {"MOONCAKE_ZMQ_MODELS__LARGE__NAME": "L"})
    assert (loaded.models["small"].config.model.path, loaded.models["large"].config.model.name) == ("/m", "L")
    with pytest.raises(ConfigError, match="there is no setting models.small.pth; did you mean path"):
        load(MODELS, {"models.small.pth": "/m"}, {})


def test_a_deployment_without_several_models_has_no_node_of_one(write):
    nodes = NODES.replace('role = "conductor"', 'role = "conductor"\nmodel = "m"')
    with pytest.raises(ConfigError, match="there is no model 'm' in .models.; there are none"):
        load(write("", nodes), {}, {})


@pytest.mark.parametrize(
    "text", ["model = 5\n[models.a]\n", "models = 5", "models = [1]", "[models]\na = 5", "[models.a]\ncosts = 5"]
)
def test_models_of_another_type_are_refused_in_one_line(write, text):
    with pytest.raises(ConfigError, match="model"):
        load(write(text + "\n"), {}, {})


def test_two_that_would_listen_at_one_port_of_a_host_are_named(write: Any) -> None:
    metrics = NODES.replace('role = "conductor"', 'role = "conductor"\nhost = "a"\nmetrics_port = 9101').replace(
        'role = "decode"', 'role = "decode"\nhost = "a"\nmetrics_port = 9101'
    )
    assert "c and d listen on 127.0.0.1:9101 of a" in fails(write("", metrics))
    assert load(write("", metrics.replace('"decode"\nhost = "a"', '"decode"\nhost = "b"')), environment={})
    own = NODES + '[[nodes]]\nname = "g"\nrole = "gateway"\nmetrics_port = 8000\n'
    assert "g and g listen on 127.0.0.1:8000" in fails(write("", own))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cluster]\ndrain_timeout_s = nan\n", "x.toml: cluster.drain_timeout_s: a number is wanted, and nan is none"),
        ('[gateway]\nhttp_host = "[::1]"\n', "http_host: write ::1, without brackets"),
    ],
)
def test_values_that_would_fail_later_are_refused(write: Any, text: str, said: str) -> None:
    assert said in fails(write(text))


def test_a_nan_of_a_nodes_own_settings_or_of_the_command_line_is_refused(write: Any) -> None:
    assert "nodes[1].settings.report_s: a number is wanted" in fails(write("", NODES + "settings = { report_s = nan }\n"))
    assert "nan is none" in fails(write(""), {"decode.report_s": "nan"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gateway.requests.deadline_s", "inf"),
        ("gateway.requests.deadline_s", "2e7"),
        ("conductor.tbt_slo_s", "2e7"),
        ("prefill.overtake", "2e6"),
        ("prefill.priority_s", "inf"),
        ("vllm.priority_s", "2e7"),
        ("vllm.overtake", "2e6"),
        ("cache_node.max_lease_s", "2e7"),
    ],
)
def test_a_time_that_no_message_can_say_is_refused(write: Any, name: str, value: str) -> None:
    """Or its peers would drop every message that says it."""
    assert name.rsplit(".", 1)[1] in fails(write(""), {name: value})
    assert load(write(""), {"conductor.tbt_slo_s": "inf"}, {}), "no bound, and said as 0"


def test_no_node_has_the_name_of_what_starts_them(write: Any) -> None:
    assert "name the node otherwise" in fails(write("", NODES.replace('"d"', '"up"')))


@pytest.mark.parametrize(
    ("settings", "longest", "lends"),
    [
        ("lend_tokens = 96", 96, False),
        ("borrow = true", 96, False),
        ("lend_tokens = 40\nborrow = true", 96 + 2 * 32, True),
        ("lend_tokens = 97", None, None),
    ],
)
def test_the_longest_request_has_what_decodes_lend_each_other(write: Any, settings: str, longest: int, lends: bool) -> None:
    nodes = NODES + "".join(f'\n[[nodes]]\nname = "d{number}"\nrole = "decode"\n' for number in range(2))
    path = write(f"[decode]\ncapacity_tokens = 96\n{settings}\n", nodes)
    if longest is None:
        assert "lend_tokens must be in 0..capacity_tokens" in fails(path)
        return
    loaded = load(path, {}, {})
    assert loaded.longest_request(1 << 20, 16) == longest
    assert loaded.longest_request(100, 16) == min(longest, 100)
    assert loaded.lends == lends
    assert any("capacity_tokens is below" in text for text in warnings(loaded)) == ("borrow" not in settings)


def test_one_node_may_lend_to_another_that_borrows(write: Any) -> None:
    lender = '\n[[nodes]]\nname = "l"\nrole = "decode"\n[nodes.settings]\nlend_tokens = 64\n'
    loaded = load(write("[decode]\ncapacity_tokens = 96\nborrow = true\n", NODES + lender), {}, {})
    assert loaded.lends
    assert loaded.longest_request(1 << 20, 16) == 96 + 64


def test_a_decode_without_a_batch_only_lends(write: Any) -> None:
    lender = (
        '\n[[nodes]]\nname = "l"\nrole = "decode"\n[nodes.settings]\ncapacity_tokens = 512\nlend_tokens = 64\nmax_batch = 0\n'
    )
    loaded = load(write("[decode]\ncapacity_tokens = 96\nborrow = true\n", NODES + lender), {}, {})
    assert loaded.longest_request(1 << 20, 16) == 96 + 64
    assert not any("capacity_tokens is below" in text for text in warnings(loaded))


def test_a_request_has_what_as_many_lend_as_may_be_named(write: Any) -> None:
    nodes = NODES + "".join(f'\n[[nodes]]\nname = "d{number}"\nrole = "decode"\n' for number in range(MAX_LENDERS + 3))
    loaded = load(write("[decode]\ncapacity_tokens = 96\nlend_tokens = 64\nborrow = true\n", nodes), {}, {})
    assert loaded.longest_request(1 << 20, 16) == 96 + 64 * MAX_LENDERS


def test_decodes_that_all_only_lend_are_refused_and_one_that_does_not_even_lend_gets_a_warning(write: Any) -> None:
    assert "x.toml: all decodes have max_batch = 0" in fails(write("[decode]\nmax_batch = 0\nlend_tokens = 64\n"))
    idle = '\n[[nodes]]\nname = "l"\nrole = "decode"\n[nodes.settings]\nmax_batch = 0\n'
    for more, warned in (("", True), ("lend_tokens = 64\n", False)):
        loaded = load(write("[decode]\nborrow = true\n", NODES + idle + more), {}, {})
        assert any("l: max_batch = 0 and lend_tokens = 0" in text for text in warnings(loaded)) == warned


@pytest.mark.parametrize(
    ("model", "node", "why"),
    [
        ("kv_codec = 'int8'", "role = 'decode'", "model.kv_codec is 'int8'"),
        ("", "role = 'prefill'\ndevice = 'cuda'", "node d has device 'cuda'"),
        ("", "role = 'vllm'", "node d is a vLLM"),
    ],
)
@pytest.mark.parametrize("where", ["[gateway.edge]\nkv_budget = true\n", "settings = { edge = { kv_budget = true } }\n"])
def test_few_tokens_are_kept_of_exact_kv_on_a_cpu_alone(write: Any, model: str, node: str, why: str, where: str) -> None:
    own = "settings" in where
    text = f"[model]\n{model}\n{'' if own else where}[[nodes]]\nname = 'd'\n{node}\n[[nodes]]\nname = 'g'\nrole = 'gateway'\n"
    with pytest.raises(ConfigError, match=f"gateway.edge.kv_budget of g is for exact KV .*: {why}"):
        load(write(text + where * own, ""), {}, {})
