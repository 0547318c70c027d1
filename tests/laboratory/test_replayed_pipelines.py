"""Pipelines in the laboratory: long prompts on the paper's hardware are sooner, short ones as soon as without."""

import json

from click.testing import CliRunner

from mooncake_zmq.cli import main


def ttft_s(tokens: int) -> list[float]:
    """Mean time to the first token with pipelines of one, two and four prefills."""
    arguments = [
        *("sim", "--generate", f"uniform:input={tokens},output=16,rate=0.05,requests=8"),
        *("--prefill", "4", "--decode", "2", "--ttft-slo", "60", "--jobs", "1", "--json"),
        *("--set", "conductor.pipeline_chunk_tokens=2048", "--sweep", "conductor.pipeline_stages=1,2,4"),
    ]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    runs = json.loads(outcome.stdout)["runs"]
    assert all(run["summary"]["finished"] == 8 for run in runs)
    return [run["summary"]["ttft_s"]["mean"] for run in runs]


def test_a_long_prompt_is_sooner_with_each_stage() -> None:
    alone, two, four = ttft_s(65_536)
    assert two < 0.7 * alone
    assert four < 0.5 * alone


def test_a_short_prompt_is_as_soon_as_without_pipelines() -> None:
    alone, two, four = ttft_s(4_096)
    assert alone == two == four
