"""`profile`, end to end with models that take no time."""

import json

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import engine_profile
from mooncake_zmq.bench.command import profile as command
from mooncake_zmq.config.load import load
from mooncake_zmq.core.profile import decode

QUICK = ["--lengths", "16,64,128", "--prefixes", "0,32", "--batches", "1,4", "--contexts", "16,64", "--rounds", "1"]


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """The work is done and timed, but its times are those of an engine beside which nothing runs: others may fit no costs."""
    prefill_times_s, decode_step_s = engine_profile.prefill_times_s, engine_profile.decode_step_s

    def prefills(engine, random, lengths, *, prefix, chunk_tokens):
        took_s = prefill_times_s(engine, random, lengths, prefix=prefix, chunk_tokens=chunk_tokens)
        assert len(took_s) == len(lengths)
        assert min(took_s) > 0
        return [1e-6 * tokens + 1e-10 * ((prefix + tokens) ** 2 - prefix**2) for tokens in lengths]

    def step(engine, prompts, *, steps):
        assert decode_step_s(engine, prompts, steps=steps) > 0
        return 1e-4 + 1e-5 * len(prompts) + 1e-8 * sum(map(len, prompts))

    monkeypatch.setattr(engine_profile, "prefill_times_s", prefills)
    monkeypatch.setattr(engine_profile, "decode_step_s", step)


def run(tmp_path, *arguments):
    options = ["--model", "dummy:tiny", "--backend", "numpy", "--cache-dir", str(tmp_path)]
    return CliRunner().invoke(command, [*options, *QUICK, *arguments])


def test_the_file_that_is_written_is_what_a_deployment_reads(tmp_path):
    out = tmp_path / "profile.json"
    ran = run(tmp_path, "--out", str(out), "--json")
    assert ran.exit_code == 0, ran.output
    measured = decode(out.read_bytes())
    assert [(t.tokens, t.prefix) for t in measured.prefill] == [(n, p) for p in (0, 32) for n in (16, 64, 128)]
    assert [(t.batch, t.context) for t in measured.decode] == [(b, c) for b in (1, 4) for c in (16, 64)]
    assert (measured.model, measured.threads) == ("dummy:tiny", 1)
    shown = json.loads(ran.stdout)
    assert len(shown["measurements"]) == len(measured.prefill) + len(measured.decode)
    file = tmp_path / "x.toml"
    file.write_text(f"[costs]\nprofile = '{out}'\n")
    costs = load(file, {}, {}).config.costs
    assert {name: getattr(costs, name) for name in shown["costs"]} == pytest.approx(shown["costs"])
    assert costs.profiled_model == measured.fingerprint


def test_the_table_shows_measured_beside_fitted_and_the_costs(tmp_path):
    ran = run(tmp_path)
    assert ran.exit_code == 0, ran.output
    assert "prefill 128 behind 32" in ran.stdout
    assert "decode step, batch 4, context 64" in ran.stdout
    assert "prefill_token_s = " in ran.stdout


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    ran = run(tmp_path, "--plot", str(tmp_path / "fit.png"))
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lengths", "16"], "two or more lengths"),
        (["--batches", "4,4"], "two or more lengths, batches"),
        (["--lengths", "16,99999"], "4096 positions"),
        (["--batches", "1,1000000"], "MiB of KV"),
        (["--lengths", "16,x"], "is not a list"),
        (["--lengths", "0,16"], "0 is below 1"),
        (["--prefixes", "-1"], "-1 is below 0"),
        (["--model", "/no/model"], "does not exist"),
        (["--out", "/no/directory/p.json"], "there is no directory"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused_in_one_line(tmp_path, arguments, complaint):
    ran = run(tmp_path, *arguments)
    assert ran.exit_code in (1, 2)
    (error,) = [line for line in ran.output.splitlines() if line.startswith("Error: ")]
    assert complaint in error


def test_the_prefixes_of_a_prompt_are_not_timed(tmp_path, monkeypatch):
    """Each length is measured behind each prefix, `rounds` times, the prefix computed once."""
    from mooncake_zmq.engine.toy import ToyEngine

    calls = []

    class Counting(ToyEngine):
        def prefill(self, sequence, tokens, **options):
            calls.append((sequence.length, len(tokens)))
            return super().prefill(sequence, tokens, **options)

    monkeypatch.setattr(engine_profile, "load_engine", lambda path, threads, backend: Counting())
    plan = engine_profile.ProfilePlan(
        model="toy", rounds=2, lengths=(8, 40), prefixes=(24,), batches=(1, 2), contexts=(4, 8), steps=2, chunk_tokens=32
    )
    engine_profile.measure(plan, lambda _: None)
    assert calls[3:10] == [(0, 24), (24, 8), (24, 8), (24, 32), (56, 8), (24, 32), (56, 8)]


def test_the_backend_that_was_measured_is_written_down():
    plan = engine_profile.ProfilePlan(
        model="toy", backend="compiled", rounds=1, lengths=(8, 40), prefixes=(0,), batches=(1, 2), contexts=(4, 8), steps=2
    )
    assert engine_profile.measure(plan, lambda _: None).backend == "compiled"
