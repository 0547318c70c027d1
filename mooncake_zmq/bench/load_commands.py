"""`bench client`, `bench gateway` and `bench longprompt`: options in, a table or one JSON object out."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec import structs

from mooncake_zmq.bench.options import (
    cache_dir_option,
    count_option,
    json_option,
    model_option,
    parts_option,
    reported,
    rounds_option,
    show_progress,
)
from mooncake_zmq.laboratory.rows import check_writable, rows_option
from mooncake_zmq.refused import Refused

if TYPE_CHECKING:
    from mooncake_zmq.bench.client import Client
    from mooncake_zmq.bench.report import Report

CLIENT_EXAMPLES = """\b
Examples:
  mooncake-zmq bench client http://127.0.0.1:8000 --trace conversation_trace.jsonl --limit 100 --fit
  mooncake-zmq bench client http://127.0.0.1:8000 --trace conversation_trace.jsonl --speed 0.1 --last-id 48000 --rows rows.csv
  mooncake-zmq bench client http://127.0.0.1:8000 --generate conversation:requests=500,rate=2 --ttft-slo 5 --tbt-slo 0.1
  mooncake-zmq bench client http://127.0.0.1:8000 --generate toolagent:requests=200,rate=4 --block-tokens 64
  mooncake-zmq bench client http://10.0.0.7:8000/v1 --trace BurstGPT_1.csv --limit 1000 --model llama --api-key $KEY --json
  mooncake-zmq bench client https://api.example.com --generate uniform:rate=1 --chat --plain --max-open 64 --beyond drop
"""
GATEWAY_EXAMPLES = """\b
Examples:
  mooncake-zmq bench gateway
  mooncake-zmq bench gateway --only relay --rounds 5 --json
"""


LONGPROMPT_EXAMPLES = """\b
Examples:
  mooncake-zmq bench longprompt
  mooncake-zmq bench longprompt --tokens 1000000 --chats 4 --rate 2 --seconds 30
  mooncake-zmq bench longprompt --tokens 8192 --rate 2 --chats 4 --vllm http://127.0.0.1:8000 --model DIRECTORY
  mooncake-zmq bench longprompt --beside "ROUTER/bin/python -m sglang_router.launch_router --worker-urls {urls} --port {port}"
"""

GATEWAY_PARTS = ("ttft", "relay", "open", "rate", "chat")


@click.command(epilog=CLIENT_EXAMPLES, context_settings={"max_content_width": 110})
@click.argument("url")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Mooncake's JSON lines, Azure's or BurstGPT's CSV."
)
@click.option("--generate", metavar="SPEC", help="Make a trace, as `mooncake-zmq sim` does.")
@click.option("--like", type=click.Path(path_type=Path), metavar="FILE", help="Make a trace by the statistics of FILE.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option("--output-tokens", type=click.IntRange(1), metavar="N", help="Of every answer, whatever the trace says.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), help="Arrivals come so many times as fast.")
@click.option(
    "--fit",
    "fitting",
    flag_value="fit",
    help="Shorten prompts and answers until the server's model takes all, and slow arrivals to what it serves, unless --speed "
    "is given.",
)
@click.option("--as-is", "fitting", flag_value="as-is", help="Send also requests that are longer than the model takes.")
@click.option("--model", default="", metavar="NAME", help="The first that the server lists by default.")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", metavar="KEY", help="Also from OPENAI_API_KEY.")
@count_option("--max-open", 1, 1024, "Streams open at once.")
@click.option(
    "--beyond",
    type=click.Choice(["wait", "drop"]),
    default="wait",
    show_default=True,
    help="A request that finds so many open waits, as do all behind it, or is not sent and counts as failed.",
)
@click.option("--text", is_flag=True, help="Prompts of words instead of token ids: equal hash ids give equal text.")
@click.option("--chat", is_flag=True, help="Ask /v1/chat/completions, one message of words.")
@click.option("--plain", is_flag=True, help="No parameters of vLLM's (ignore_eos, return_token_ids): answers may end earlier.")
@count_option("--first-id", 0, 0, "Prompts' ids are from this one on ...")
@count_option("--last-id", 0, 255, "... to this one.")
@click.option(
    "--block-tokens", type=click.IntRange(1, 512), default=512, help="A hash id stands for so many; shortens prompts."
)
@click.option("--ttft-slo", type=click.FloatRange(min=0), metavar="S", help="Of goodput: seconds to the first token.")
@click.option("--tbt-slo", type=click.FloatRange(min=0), metavar="S", help="Of goodput: mean of the longest tenth of the gaps.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True, help="Of an answer, s."
)
@rows_option
@json_option
def client(
    url: str,
    trace: Path | None,
    generate: str | None,
    like: Path | None,
    limit: int | None,
    output_tokens: int | None,
    speed: float | None,
    fitting: Literal["fit", "as-is"] | None,
    ttft_slo: float | None,
    tbt_slo: float | None,
    rows_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace against any OpenAI endpoint at URL, each request at its time, and report how it was served.

    Prompts are made of the trace's hash ids. TTFT counts from sending, with the connection's time; TBT is the mean of a
    request's longest tenth of gaps. The lag of this client itself stands in the last rows. Where the server sends no token ids
    (--plain, or it does not know them) a piece of text counts as a token where gaps are taken.

    A trace with requests that are longer than the model's context (max_model_len of /v1/models) is not sent, and the exit
    status is 2, unless --fit or --as-is says what to do. Else it is 0 if any request was answered to its end, or 1.
    """
    import uvloop

    from mooncake_zmq.bench.client_fit import send
    from mooncake_zmq.bench.client_report import Bounds, show, write_rows
    from mooncake_zmq.laboratory.command import source_of
    from mooncake_zmq.laboratory.jobs import load

    try:
        check_writable(rows_file, "--rows", trace, like)
        asked = _client(url, speed or 1.0, **options)
        arrivals = load(structs.replace(source_of(trace, generate, like, limit), output_tokens=output_tokens))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            replayed = runner.run(send(asked, arrivals, fitting, speed is not None, show_progress))
        if rows_file is not None:
            write_rows(rows_file, replayed)
    except ValueError as error:
        raise Refused(str(error)) from None
    sys.exit(show(replayed, url, Bounds(ttft_s=ttft_slo, tbt_s=tbt_slo), as_json=as_json))


def _client(
    url: str,
    speed: float,
    *,
    text: bool,
    chat: bool,
    first_id: int,
    last_id: int,
    block_tokens: int,
    timeout: float,
    **options: Any,
) -> "Client":
    from mooncake_zmq.bench.client import Client
    from mooncake_zmq.bench.client_prompts import PromptForm

    form = PromptForm(text=text or chat, first_id=first_id, last_id=last_id, block_tokens=block_tokens)
    return Client(url=url, speed=speed, form=form, chat=chat, timeout_s=timeout, **options)


@click.command(epilog=GATEWAY_EXAMPLES)
@rounds_option(3)
@parts_option(GATEWAY_PARTS)
@reported()
def gateway(**parameters: Any) -> "Report":
    """Measure what the gateway adds: TTFT at idle, CPU time of its process per token, a thousand open streams, 200 requests a
    second, the next turn of a long chat.

    Engines are the toy's or modelled, so it takes no GPU; everything else is real. About two minutes on 2 cores.
    """
    from mooncake_zmq.bench.gateway import bench_gateway

    return bench_gateway(**parameters, progress=show_progress)


@click.command(epilog=LONGPROMPT_EXAMPLES, context_settings={"max_content_width": 110})
@count_option("--tokens", 1000, 100_000, "Of each conversation at first.")
@click.option("--rate", type=click.FloatRange(0.1), default=50.0, show_default=True, help="Turns a second, of all together.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="How long turns come.")
@count_option("--chats", 1, 50, "Conversations, which take turns.")
@click.option("--vllm", "vllms", multiple=True, metavar="URL", help="A running vLLM with --model; may be repeated.")
@click.option("--beside", default="", metavar="COMMAND", help="Start this router too: {urls} of the servers, its own {port}.")
@model_option
@cache_dir_option
@reported()
def longprompt(**wanted: Any) -> "Report":
    """Measure what gateway and conductor add to conversations of very long prompts, and what these do to short answers.

    Servers sleep in place of vLLMs, so it takes no GPU; the tokenizer, the nodes and all else is real. The same calls are sent
    straight to a server first. About three minutes, and one more with another router. With --vllm it measures running vLLMs
    instead; their context must hold --tokens and 400 more a turn.
    """
    from mooncake_zmq.bench.longprompt import LongPrompts, bench_longprompt

    return bench_longprompt(LongPrompts(**wanted), show_progress)
