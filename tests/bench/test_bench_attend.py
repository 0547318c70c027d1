"""`bench attend` at toy size: two processes, equal tokens, and as many bytes as the arithmetic says."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import attend
from mooncake_zmq.bench.command import bench
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.engine.weights import open_model

MODEL = 'dummy:{"layers": 2}'
SIZES = ["--tokens", "200", "--lent", "96", "--batch", "3", "--steps", "3", "--rounds", "1"]


@pytest.mark.parametrize(
    "options", [["--backend", "numpy"], ["--clear"], ["--tokens", "380", "--lenders", "3"]], ids=["numpy", "clear", "three"]
)
def test_each_way_gives_the_tokens_of_all_kv_at_hand(options: list[str]) -> None:
    result = CliRunner().invoke(bench, ["attend", "--model", MODEL, *SIZES, *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(report["rows"]) == 2
    part, far = [note for note in report["notes"] if "greedy tokens equal" in note]
    spec = open_model(prepare(MODEL, default_cache_dir())).spec
    asked_and_answered = spec.layers * 4 * spec.heads * (2 * spec.head_dim + 2)
    new = spec.layers * 4 * 2 * spec.kv_heads * spec.head_dim
    assert f"; {asked_and_answered * (3 if '--lenders' in options else 1) / 1e3:.3f} kB of payload a token" in part
    assert f"; {(asked_and_answered + new) / 1e3:.3f} kB of payload a token" in far
    assert any("ESTIMATE" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [(["toy"], "no KV of floats"), (["dummy:tiny", "--tokens", "64", "--lent", "64"], "lend fewer")],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["attend", "--model", *options])
    assert result.exit_code != 0
    assert message in result.output


def test_other_tokens_than_those_of_all_kv_at_hand_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = attend._Study._steps

    def wrong(study, way, sequences, loans):  # type: ignore[no-untyped-def]
        steps(study, way, sequences, loans)
        if loans:
            way.logits[0][0, 0] = np.nan

    monkeypatch.setattr(attend._Study, "_steps", wrong)
    result = CliRunner().invoke(bench, ["attend", "--model", MODEL, "--backend", "numpy", *SIZES])
    assert result.exit_code != 0
    assert "greatest error of a logit nan" in result.output


def test_lenders_without_cores_of_their_own_are_said_so() -> None:
    bench = attend.AttendBench(threads=1, lenders=3)
    assert attend.threads_note(bench, cores=4).endswith("so more cores")
    assert "on 2 cores, for which they wait" in attend.threads_note(bench, cores=2)
