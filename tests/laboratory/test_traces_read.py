"""Traces: what is read, what is refused and where, and that generated ones have the statistics asked for."""

import gzip
import json

import pytest

from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.generated import KINDS, fit, generate, lognormal, parse_spec
from mooncake_zmq.laboratory.traces import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319610,110,27
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
60,ChatGPT,0,0,0,Conversation log
70,ChatGPT,55,0,55,Conversation log
"""


def line(**changes):
    return json.dumps({"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]} | changes)


def written(path, text):
    path.write_text(text)
    return path


def statistics(arrivals):
    """Mean input, mean output, hit ratio of a cache that never evicts, by block."""
    seen, hits, blocks = set(), 0, 0
    for each in arrivals:
        hits += next((at for at, block in enumerate(each.hash_ids) if block not in seen), len(each.hash_ids))
        blocks += len(each.hash_ids)
        seen.update(each.hash_ids)
    count = len(arrivals)
    return sum(a.input_tokens for a in arrivals) / count, sum(a.output_tokens for a in arrivals) / count, hits / blocks


def test_mooncake_lines_come_in_order_from_time_zero(tmp_path):
    text = "\n".join([line(timestamp=4500), line(timestamp=1500, hash_ids=[3, 9]), ""])
    first, second = read_trace(written(tmp_path / "t.jsonl", text))
    assert (first.at_s, first.input_tokens, first.output_tokens, first.hash_ids) == (0.0, 600, 5, (3, 9))
    assert (second.at_s, second.hash_ids) == (3.0, (3, 4))


def test_a_packed_trace_reads_like_a_plain_one(tmp_path):
    for name, text in (("a.jsonl", line()), ("b.csv", AZURE), ("c.csv", BURST)):
        plain = read_trace(written(tmp_path / name, text))
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(text.encode()))
        assert read_trace(packed) == plain


def test_csvs_have_no_prompt_twice(tmp_path):
    azure = read_trace(written(tmp_path / "azure.csv", AZURE))
    assert [(a.input_tokens, a.output_tokens) for a in azure] == [(4808, 10), (110, 27)]
    assert azure[1].at_s == pytest.approx(0.052001, abs=1e-6)
    burst = read_trace(written(tmp_path / "burst.csv", BURST))
    assert [(a.at_s, a.input_tokens, a.output_tokens) for a in burst] == [(0.0, 472, 18), (40.5, 1087, 230)]
    for arrivals in (azure, burst):
        ids = [block for each in arrivals for block in each.hash_ids]
        assert len(set(ids)) == len(ids) == sum(-(-each.input_tokens // 512) for each in arrivals)


def test_azure_dates_of_2024_carry_a_zone(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    )
    assert read_trace(written(tmp_path / "t.csv", text))[1].at_s == pytest.approx(0.99007, abs=1e-6)


def test_a_begun_block_without_an_id_is_like_no_other(tmp_path):
    text = "\n".join([line(hash_ids=[3]), line(hash_ids=[3]), line(hash_ids=[])])
    ids = [each.hash_ids for each in read_trace(written(tmp_path / "t.jsonl", text))]
    assert ids[0][0] == ids[1][0] == 3
    assert len({ids[0][1], ids[1][1], *ids[2]}) == 4


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (line() + "\n{", ":2:", "truncated"),
        (line() + "\n" + line(input_length=0), ":2:", "input_length"),
        (line() + "\n" + line(output_length=1.5), ":2:", "output_length"),
        (line(hash_ids=[1, 2, 3]), ":1:", "600 tokens are 2 blocks"),
        (line(timestamp=-1), ":1:", "timestamp"),
        ('{"timestamp": 1}', ":1:", "input_length"),
        (AZURE + "yesterday,5,5\n", ":4:", "no date"),
        (AZURE + "2023-11-16 18:17:05.1,x,5\n", ":4:", "ContextTokens 'x'"),
        (AZURE + "2023-11-16 18:17:05.1,5\n", ":4:", "2 columns"),
        (BURST + "nan,GPT-4,5,5,10,API log\n", ":6:", "Timestamp"),
        (BURST + "80,GPT-4,5,-5,10,API log\n", ":6:", "Response tokens"),
        ("a,b,c\n1,2,3\n", ":1:", "neither JSON lines nor"),
        ("", "", "is empty"),
        (BURST.splitlines()[0] + "\n", "", "no request"),
    ],
)
def test_a_bad_row_is_one_error_that_names_its_line(tmp_path, text, where, what):
    path = written(tmp_path / "t", text)
    with pytest.raises(StudyError) as caught:
        read_trace(path)
    assert f"{path}{where}" in str(caught.value)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_said(tmp_path):
    for path, said in ((tmp_path / "none", "there is no .*/none: 'mooncake-zmq trace-data' says"), (tmp_path, "cannot read")):
        with pytest.raises(StudyError, match=said):
            read_trace(path)
    (tmp_path / "bad.gz").write_bytes(b"not packed")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(BURST.encode() * 100)[:60])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00{}")
    for name in ("bad.gz", "cut.gz", "binary"):
        with pytest.raises(StudyError, match="cannot read"):
            read_trace(tmp_path / name)


def test_only_the_first_requests_are_read(tmp_path):
    path = written(tmp_path / "t", "\n".join([line(), line(), "broken"]))
    assert len(read_trace(path, 2)) == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_a_generated_conversation_looks_like_the_public_one(seed):
    """Of the public trace: 12,031 requests, 3.4 a second; mean lengths 12,035 and 343; hit ratio .366 by block."""
    arrivals = generate(parse_spec(f"conversation:requests=12031,rate=3.4,seed={seed}"))
    asked, made, hits = statistics(arrivals)
    assert asked == pytest.approx(12_035, rel=0.01)
    assert made == pytest.approx(343, rel=0.01)
    assert hits == pytest.approx(0.366, abs=0.03)
    assert len(arrivals) / arrivals[-1].at_s == pytest.approx(3.4, rel=0.05)
    assert all(each.at_s % 3 == 0 for each in arrivals)
    assert arrivals[0].hash_ids[0] == arrivals[-1].hash_ids[0]


@pytest.mark.parametrize(("kind", "hits"), [("toolagent", 0.59), ("synthetic", 0.66), ("uniform", 0.0)])
def test_other_kinds_come_near_what_was_published(kind, hits):
    arrivals = generate(parse_spec(kind))
    asked, made, found = statistics(arrivals)
    assert asked == pytest.approx(KINDS[kind].input, rel=0.02)
    assert made == pytest.approx(KINDS[kind].output, rel=0.02)
    assert found == pytest.approx(hits, abs=0.05)


def test_a_trace_fitted_to_another_has_its_statistics():
    model = generate(parse_spec("conversation:requests=4000,rate=5,seed=3,input=5000,follow=0.6"))
    shape = fit(model)
    alike = generate(parse_spec("like:seed=9", shape))
    assert statistics(alike)[:2] == pytest.approx(statistics(model)[:2], rel=0.02)
    assert statistics(alike)[2] == pytest.approx(statistics(model)[2], abs=0.04)
    assert len(alike) == 4000
    assert len(alike) / alike[-1].at_s == pytest.approx(len(model) / model[-1].at_s, rel=0.05)
    assert len(generate(parse_spec("like:requests=10", shape))) == 10


def test_the_same_seed_makes_the_same_trace():
    text = "conversation:requests=200"
    assert generate(parse_spec(text)) == generate(parse_spec(text))
    assert generate(parse_spec(text)) != generate(parse_spec(f"{text},seed=1"))


def test_a_prompt_has_an_id_for_each_block_and_none_twice():
    for each in generate(parse_spec("synthetic:requests=500")):
        assert len(each.hash_ids) == -(-each.input_tokens // 512)
        assert len(set(each.hash_ids)) == len(each.hash_ids)


@pytest.mark.parametrize(
    "spec",
    [
        *("nothing", "conversation:foo=1", "conversation:rate=fast", "conversation:rate", "conversation:rate=0", "like"),
        *("uniform:input=0", "uniform:requests=1.5", "uniform:requests=0", "conversation:follow=2", "conversation:rate=nan"),
        *("conversation:input_sigma=-1", "conversation:requests=nan", "conversation:seed=inf", "uniform:input_max=nan"),
    ],
)
def test_a_spec_that_is_none_is_refused_in_one_line(spec):
    with pytest.raises(StudyError) as caught:
        parse_spec(spec)
    assert "\n" not in str(caught.value)


def test_a_cut_lognormal_has_the_mean_asked_for():
    points = lognormal(300, 1.5, 1000)
    assert sum(a + b for a, b in zip(points, points[1:], strict=False)) / 2 / (len(points) - 1) == pytest.approx(300, rel=1e-6)
    assert max(points) == 1000
