"""`mooncake-zmq sim`: what it prints, in which order, and how it refuses; its workers, and the same on Dask."""

import json

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.extras import installing
from mooncake_zmq.laboratory import report
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.generated import parse_spec
from mooncake_zmq.laboratory.jobs import Job, Line, Source, load, run_job, run_jobs, run_on_dask, run_text
from mooncake_zmq.laboratory.profiles import A800, H800
from mooncake_zmq.laboratory.rows import rows_of
from mooncake_zmq.laboratory.settings import assigned, axes_of, sweep
from mooncake_zmq.laboratory.study import RequestRecord, Setup
from mooncake_zmq.laboratory.trace_data import trace_data

SPEC = "conversation:requests=40,seed=2"
SETUP = Setup(prefill=2, decode=1, hardware=A800, policy="vllm")


def sim(*arguments):
    return CliRunner().invoke(main, ["sim", *arguments])


def ignored(number, share):
    pass


def test_a_run_is_one_json_object():
    result = sim("--generate", SPEC, "--policy", "vllm-prefix", "--prefill", "2", "--decode", "1", "--json")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["summary"]["requests"] == run["summary"]["finished"] == 40
    assert run["setup"]["policy"] == "vllm-prefix"
    assert run["setup"]["hardware"]["name"] == "a800-llama3-70b"
    assert run["swept"] == {}
    assert run["ttft_quantiles_s"] == sorted(run["ttft_quantiles_s"])
    assert run["summary"]["peak_mib"] > 10


def test_a_sweep_runs_each_combination_in_order():
    options = [
        "--sweep",
        "policy=vllm-chunked,vllm",
        "--sweep",
        "speed=4,1,2",
        "--jobs",
        "3",
        "--prefill",
        "1",
        "--decode",
        "0",
    ]
    result = sim("--generate", SPEC, *options, "--json")
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    swept = [(run["swept"]["policy"], run["swept"]["speed"]) for run in runs]
    assert swept == [(policy, speed) for policy in ("vllm-chunked", "vllm") for speed in ("4", "1", "2")]
    assert [(run["setup"]["policy"], run["setup"]["speed"]) for run in runs] == [(p, float(s)) for p, s in swept]
    alone = run_job(
        Job(Source(shape=parse_spec(SPEC)), Setup(prefill=1, decode=0, hardware=A800, policy="vllm", speed=2.0)), print
    )
    assert runs[-1]["summary"]["ttft_s"]["mean"] == report.outcome_of(alone).summary.ttft_s.mean


def test_tables_are_for_people(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]}) + "\n")
    one = sim(str(path), "--policy", "vllm", "--prefill", "1", "--decode", "0")
    assert one.exit_code == 0, one.output
    assert "TTFT mean, p50, p90, p99" in one.stdout
    many = sim(str(path), "--sweep", "policy=vllm,vllm-both", "--prefill", "1", "--decode", "0")
    assert "2 runs" in many.stdout


def test_help_has_examples():
    result = sim("--help")
    assert result.exit_code == 0
    assert "--sweep policy=global,local,load,random" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a TRACE"),
        (["none.jsonl"], "there is no none.jsonl: 'mooncake-zmq trace-data' says"),
        (["--generate", "nothing"], "'nothing' is none of"),
        (["--generate", SPEC, "--like", "none.csv"], "there is no none.csv"),
        (["--generate", SPEC, "--hardware", "measured:none.json"], "'mooncake-zmq profile --out none.json'"),
        (["--generate", SPEC, "--csv", "none/rows.csv"], "--rows none/rows.csv: No such file"),
        (["--generate", SPEC, "--policy", "best"], "policy 'best' is none of"),
        (["--generate", SPEC, "--admission", "maybe"], "admission 'maybe'"),
        (["--generate", SPEC, "--order", "last"], "order 'last'"),
        (["--generate", SPEC, "--hardware", "abacus"], "hardware 'abacus'"),
        (["--generate", SPEC, "--policy", "vllm", "--admission", "early"], "vLLM refuses nothing"),
        (["--generate", SPEC, "--speed", "0"], "speed must be positive"),
        (["--generate", SPEC, "--prefill", "0"], "needs a prefill"),
        (["--generate", SPEC, "--sweep", "speed"], "write KEY=VALUE"),
        (["--generate", SPEC, "--sweep", "speed=1,fast"], "a number is needed"),
        (["--generate", SPEC, "--sweep", "speed=1", "--sweep", "speed=2"], "given twice"),
        (["--generate", SPEC, "--sweep", "speed=1,1"], "given twice"),
        (["--generate", SPEC, "--sweep", f"seed={','.join(map(str, range(1001)))}"], "at most 1,000"),
        (["--generate", SPEC, "--set", "conductor.nothing=1"], "no setting 'conductor.nothing'"),
        (["--generate", SPEC, "--set", "coupled.nothing=1"], "coupled.nothing is no setting"),
        (["--generate", SPEC, "--set", "hardware.name=1"], "no setting 'hardware.name'"),
        (["--generate", SPEC, "--set", "costs.prefill_token_s=-1"], "must be positive"),
        (["--generate", SPEC, "--set", "colour=red"], "no setting 'colour'"),
        (["--generate", SPEC, "--set", "prefill.blend=true"], "prefill.blend: a trace does not name the tokens"),
        (["--generate", SPEC, "--set", "decode.selection=quest"], "decode.selection: its steps cost"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, said):
    result = sim(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_refused_command_leaves_the_files_that_it_would_have_written(tmp_path):
    rows, page, trace = tmp_path / "rows.csv", tmp_path / "page.html", tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]}) + "\n")
    before = trace.read_text()
    for path in (rows, page):
        path.write_text("of earlier")
    for arguments in (
        ["--generate", SPEC, "--rows", str(rows), "--page", str(page), "--sweep", "policy=global,load"],
        ["none.jsonl", "--rows", str(rows)],
        [str(trace), "--rows", str(trace)],
        [str(trace), "--page", str(trace)],
    ):
        assert sim(*arguments).exit_code == 2
    assert (rows.read_text(), page.read_text(), trace.read_text()) == ("of earlier", "of earlier", before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "rows.csv", "t.jsonl"]


def test_a_bad_row_late_in_the_trace_is_said_by_the_worker(tmp_path):
    good = json.dumps({"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]})
    path = tmp_path / "t.jsonl"
    path.write_text(f"{good}\n{good}\nbad\n")
    result = sim(str(path), "--policy", "vllm")
    assert result.exit_code == 2
    assert f"{path}:3:" in result.output
    assert sim(str(path), "--policy", "vllm", "--limit", "2", "--json").exit_code == 0


def test_settings_are_set_by_name():
    assert assigned(SETUP, "ttft-slo", "5").ttft_slo_s == 5.0
    assert assigned(SETUP, "hardware", "h800-llama3-70b").hardware == H800
    assert assigned(SETUP, "hardware.decode_tokens", "7").hardware.decode_tokens == 7
    assert assigned(SETUP, "costs.decode_step_s", "0.5").hardware.costs.decode_step_s == 0.5
    found = assigned(assigned(SETUP, "coupled.mixed", "add"), "conductor.tie_ratio", "0.1")
    assert found.overrides == {"coupled.mixed": "add", "conductor.tie_ratio": 0.1}


def test_the_last_key_of_a_sweep_changes_fastest():
    runs = sweep(SETUP, axes_of(["prefill=1,2", "seed=5,6"]))
    assert [(setup.prefill, setup.seed) for _, setup in runs] == [(1, 5), (1, 6), (2, 5), (2, 6)]
    assert sweep(SETUP, []) == [({}, SETUP)]


def test_jobs_and_results_travel_as_json():
    job = Job(Source(shape=parse_spec(SPEC), first=10, output_tokens=1), SETUP)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
    line = msgspec.json.decode(run_text(msgspec.json.encode(job).decode()), type=Line)
    assert line.result is not None
    there, here = line.result, run_job(job, lambda share: None)
    assert there.requests == here.requests
    assert [each.output_tokens for each in there.requests] == [1] * 10
    assert [each.output_tokens for each in load(job.source)] == [1] * 10


def test_the_first_failing_job_is_the_error(tmp_path):
    good = Job(Source(shape=parse_spec(SPEC)), SETUP)
    bad = Job(Source(path=str(tmp_path / "none")), SETUP)
    with pytest.raises(StudyError, match="there is no /"):
        run_jobs([good, bad, good], 2, lambda result: None, ignored)


def test_the_same_runs_come_from_a_dask_cluster():
    distributed = pytest.importorskip("distributed")
    jobs = [Job(Source(shape=parse_spec(SPEC)), assigned(SETUP, "speed", speed)) for speed in ("1", "2")]
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster:
        there = run_on_dask(cluster.scheduler_address, jobs, lambda result: result.requests, ignored)
        with pytest.raises(StudyError, match="there is no /"):
            run_on_dask(cluster.scheduler_address, [Job(Source(path="/none"), SETUP)], lambda result: None, ignored)
    assert there == [run_job(job, lambda share: None).requests for job in jobs]


def test_without_dask_or_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = sim("--generate", SPEC, "--policy", "vllm", "--dask", "tcp://none:1")
    assert (result.exit_code, installing("dask") in result.output) == (2, True)
    result = sim("--generate", SPEC, "--policy", "vllm", "--plot", str(tmp_path))
    assert (result.exit_code, installing("lab") in result.output) == (2, True)


def test_rows_of_requests_are_an_array_of_numpy_with_the_settings_that_differ(tmp_path):
    path = tmp_path / "rows.csv"
    options = ["--prefill", "1", "--decode", "1", "--csv", str(path)]
    result = sim("--generate", SPEC, "--sweep", "policy=vllm,vllm-both", "--sweep", "prefill=1,2", *options, "--json")
    assert result.exit_code == 0, result.output
    rows = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert set(rows.dtype.names[:4]) == {"run", "prefill_nodes", "policy", "at_s"}
    runs = json.loads(result.stdout)["runs"]
    assert len(rows) == sum(run["summary"]["requests"] for run in runs)
    for number, run in enumerate(runs):
        mine = rows[rows["run"] == number]
        assert set(mine["policy"]) == {run["setup"]["policy"]}
        assert mine["ttft_s"][mine["ttft_s"] >= 0].mean() == pytest.approx(run["summary"]["ttft_s"]["mean"])


def test_a_file_of_arrays_has_what_the_csv_has(tmp_path):
    for name in ("rows.csv", "rows.npz"):
        result = sim("--generate", SPEC, "--sweep", "policy=vllm,vllm-both", "--rows", str(tmp_path / name))
        assert result.exit_code == 0, result.output
    text = np.genfromtxt(tmp_path / "rows.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    arrays = np.load(tmp_path / "rows.npz")
    assert arrays.files == list(text.dtype.names)
    assert set(arrays["policy"]) == {"vllm", "vllm-both"}
    for name in arrays.files:
        if text[name].dtype.kind != "b":  # an empty column, as genfromtxt reads it
            assert arrays[name].dtype.kind == text[name].dtype.kind
            assert (arrays[name] == text[name]).all()


def test_a_value_of_a_row_has_nothing_that_a_simple_reader_stumbles_over():
    (row,) = rows_of([RequestRecord(0.5, 1, 2, reason='1, "a"\nb')], ["at_s", "reason", "outcome"])
    assert row == "0.5,1; 'a' b,"


def test_a_file_that_is_not_the_public_trace_is_said_to_be_another(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]}) + "\n")
    result = CliRunner().invoke(trace_data, [str(path)])
    assert result.exit_code == 0
    assert "not that of the public conversation trace" in result.output
    assert CliRunner().invoke(trace_data, ["none.jsonl"]).exit_code == 2
    assert "https://raw.githubusercontent.com/kvcache-ai/Mooncake/" in CliRunner().invoke(trace_data, []).output
