"""`mooncake-zmq answers fill`: predicts likely prompts by the served model itself, and has the gateway answer them ahead."""

import json
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import click
import httpx

from mooncake_zmq.core.messages import MAX_LOGPROBS
from mooncake_zmq.gateway.answers.likely import Following, likely
from mooncake_zmq.gateway.openai.answer_keys import normalised
from mooncake_zmq.operate.options import ca_option
from mooncake_zmq.refused import Refused

PLACE = "{prompt}"
"""The text of a template that stands for what a user writes."""
TIMEOUT_S = 600.0
TRIES = 6
"""How often a call is sent that the gateway refuses for now."""
LONGEST_WAIT_S = 30.0
SAY_EVERY_S = 15.0
NOT_KEPT = "the gateway keeps no such answer: it needs enabled = true in [gateway.answers], with allow_open a cache_salt too"


class Api:
    """A gateway, as any client calls it. Raises Refused."""

    def __init__(
        self,
        url: str,
        api_key: str,
        verify: ssl.SSLContext | bool,
        transport: httpx.BaseTransport | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        place = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=place, headers=headers, verify=verify, timeout=TIMEOUT_S, transport=transport)
        self._wait = wait

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a body. A refusal for now (429, 503) is waited for as long as it says, some times."""
        try:
            answer = self._client.post(path, json=body)
            for _ in range(TRIES - 1):
                if answer.status_code not in (429, 503) or "retry-after" not in answer.headers:
                    break
                self._wait(min(float(answer.headers["retry-after"]), LONGEST_WAIT_S))
                answer = self._client.post(path, json=body)
            found = answer.json()
            if answer.status_code != httpx.codes.OK:
                raise Refused(f"{path}: {answer.status_code} {found['error']['message']}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refused(f"{self._client.base_url}: {error or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError):
            raise Refused(f"{self._client.base_url}{path}: what answers there is no gateway") from None
        return found


class Predicted:
    """The prompts that the served model expects in the place of a template, the likeliest first."""

    def __init__(self, api: Api, template: dict[str, Any], width: int) -> None:
        """`width`: the likeliest tokens that are looked at behind each beginning of a prompt."""
        self._api, self._width = api, width
        self._looked, self._say_at = 0, time.monotonic() + SAY_EVERY_S
        self._named = {"model": template["model"]} if "model" in template else {}
        kwargs = {"chat_template_kwargs": template["chat_template_kwargs"]} if "chat_template_kwargs" in template else {}
        asked = {**self._named, **kwargs, "messages": template["messages"], "add_generation_prompt": False}
        tokens = api.post("/tokenize", asked)["tokens"]
        written = api.post("/detokenize", {**self._named, "tokens": tokens})["prompt"]
        self._before, place, after = written.rpartition(PLACE)
        if not place or not after:
            raise Refused(f"the chat template writes {PLACE} in another form, or no mark behind it that would end a prompt")
        self._end = self._api.post("/tokenize", self._plain(after, return_token_strs=True))["token_strs"][0]

    def prompts(self, max_nll: float, at_once: int, beginnings: int, *, approximate: bool) -> Iterator[tuple[str, float]]:
        """Yield different prompts and their negative log likelihood. `beginnings`: the most that are looked at; `approximate`:
        as the gateway has it."""
        seen = set()
        for text, nll in likely(self._expand, max_nll=max_nll, at_once=at_once, most_expanded=beginnings):
            if (even := normalised(text) if approximate else text) not in seen and text.strip():
                seen.add(even)
                yield text, nll

    def _expand(self, texts: list[str]) -> list[list[Following]]:
        if (now := time.monotonic()) >= self._say_at:
            click.echo(f"looked at {self._looked:,} beginnings of prompts", err=True)
            self._say_at = now + SAY_EVERY_S
        self._looked += len(texts)
        tokens = [self._api.post("/tokenize", self._plain(self._before + text))["tokens"] for text in texts]
        asked = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": self._width, "ignore_eos": True}
        choices = self._api.post("/v1/completions", {**self._named, **asked})["choices"]
        return [self._following(choice["logprobs"]["top_logprobs"]) for choice in choices]

    def _following(self, top: Sequence[dict[str, float]]) -> list[Following]:
        return [
            (None if piece == self._end else piece, -logprob)
            for piece, logprob in (top[0] if top else {}).items()
            if not piece.startswith("bytes:")  # a part of a character
        ]

    def _plain(self, text: str, **more: Any) -> dict[str, Any]:
        return {**self._named, "prompt": text, "add_special_tokens": False, **more}


def read_template(path: Path | None) -> dict[str, Any]:
    """Return the body of a chat in which `PLACE` is the last message. Raises Refused."""
    if path is None:
        return {"messages": [{"role": "user", "content": PLACE}]}
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        last = body["messages"][-1]["content"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Refused(f"--template {path}: no body of a chat in JSON: {error}") from None
    if last != PLACE:
        raise Refused(f"--template {path}: the content of its last message is {PLACE}")
    return body


def answer_ahead(api: Api, template: dict[str, Any], prompt: str) -> bool:
    """Have the gateway answer a prompt as applications ask it; return whether it had kept the answer before. Raises Refused,
    also if the answer is not kept."""
    *before, last = template["messages"]
    body = {**template, "messages": [*before, {**last, "content": prompt}], "temperature": 0, "stream": False}
    served: dict[str, Any] = api.post("/v1/chat/completions", body)["mooncake"]
    if not (served.get("kept") or "answered_from" in served):
        raise Refused(NOT_KEPT)
    return "answered_from" in served


def check_keeps(api: Api, template: dict[str, Any]) -> None:
    """Ask for one token, before minutes of predictions. Raises Refused if its gateway keeps no such answers."""
    others = {name: said for name, said in template.items() if name not in ("min_tokens", "max_completion_tokens")}
    answer_ahead(api, {**others, "max_tokens": 1}, PLACE)


@click.group()
def answers() -> None:
    """Answer prompts ahead, for gateways that keep answers ([gateway.answers]).

    \b
    Example:
      mooncake-zmq answers fill http://127.0.0.1:8000 --limit 1000 --nll 20
    """


@answers.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--template",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='A chat as applications send it, in JSON; its last content is "{prompt}".',
)
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Prompts that are answered.")
@click.option(
    "--nll",
    type=click.FloatRange(min=0),
    default=12.0,
    show_default=True,
    help="Largest negative log likelihood of a prompt, in nats.",
)
@click.option(
    "--width",
    type=click.IntRange(1, MAX_LOGPROBS),
    default=MAX_LOGPROBS,
    show_default=True,
    help="Likeliest tokens behind each beginning.",
)
@click.option("--beginnings", type=click.IntRange(1), default=5000, show_default=True, help="Beginnings of prompts looked at.")
@click.option("--approximate", is_flag=True, help="Prompts that such a gateway takes for one are answered once.")
@click.option("--at-once", type=click.IntRange(1, 64), default=4, show_default=True, help="Beginnings and answers at one time.")
@click.option(
    "--api-key",
    default="",
    envvar="OPENAI_API_KEY",
    metavar="KEY",
    help="Of the tenant whose prompts these are; also from OPENAI_API_KEY.",
)
@ca_option
@click.option("--dry-run", is_flag=True, help="Print the prompts without answering them.")
def fill(
    url: str,
    template: Path | None,
    limit: int,
    nll: float,
    width: int,
    beginnings: int,
    approximate: bool,
    at_once: int,
    api_key: str,
    ca: str,
    dry_run: bool,
) -> None:
    """Predict likely prompts by the model that the gateway at URL serves, and have it answer them ahead.

    The model is asked what users would write behind its chat template: the likeliest beginnings first, until LIMIT prompts are
    complete, none is left with a negative log likelihood of at most NLL, or BEGINNINGS were looked at. Each prompt is then
    asked at temperature 0, so that the gateway keeps the answer; the first that it does not keep ends this. A template must
    have the fields that applications send, as these are a part of the key. Each gateway keeps answers of its own. Prints a line
    for each prompt: its negative log likelihood and the prompt in JSON.

    \b
    Examples:
      mooncake-zmq answers fill --dry-run
      mooncake-zmq answers fill http://127.0.0.1:8000 --limit 1000 --nll 20
      mooncake-zmq answers fill --template chat.json
      where chat.json is {"max_tokens": 200, "messages": [{"role": "user", "content": "{prompt}"}]}
    """
    body = read_template(template)
    try:
        api = Api(url, api_key, ssl.create_default_context(cafile=ca) if ca else True)
    except OSError as error:
        raise Refused(f"--ca {ca}: {error.strerror or error}") from None
    if not dry_run:
        check_keeps(api, body)
    found = []
    predicted = Predicted(api, body, width).prompts(nll, at_once, beginnings, approximate=approximate)
    for prompt, cost in islice(predicted, limit):
        click.echo(f"{cost:.2f} {json.dumps(prompt, ensure_ascii=False)}")
        found.append(prompt)
    if dry_run:
        return
    with ThreadPoolExecutor(at_once) as pool:  # after the first that fails, `map` cancels the others
        known = sum(pool.map(lambda prompt: answer_ahead(api, body, prompt), found))
    click.echo(f"{len(found)} prompts answered, {known} of them from answers that were kept before", err=True)
