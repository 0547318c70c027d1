"""The page a browser sees at the gateway's root: one file that asks the gateway for all it shows, and what it may do there. The
same file shows a replay that is written into it."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

POLICY_PLACE, TAPE_PLACE = "<!--policy-->", "<!--tape-->"
"""Places in the page for a replay's policy and data, empty in a live page."""
_BLANK = re.compile(r"\{\{(\w+)\}\}")


@cache
def sheet() -> str:
    """Return the page's source; blanks are outside its style and its script."""
    return (files("mooncake_zmq.gateway.http") / "page.html").read_text(encoding="utf-8")


@cache
def headers() -> Mapping[str, str]:
    """Return the headers of the page: it may run only its own script and style, by their hashes, and call only its gateway."""
    policy = (
        "default-src 'none'",
        *_runs(),
        "connect-src 'self'",
        "img-src 'self' data:",
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
    )
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def replay_page(title: str, tape: bytes) -> str:
    """The same page as a file of its own, which shows the `tape` of a replay and sends no request. `title`: in place of
    the model's name; `tape`: gzip of lines of JSON, as `laboratory.tape` writes them."""
    policy = ("default-src 'none'", *_runs(), "img-src data:", "base-uri 'none'", "form-action 'none'")
    blanks = {"base": "", "model": title, "max_model_len": "", "curl": ""}
    page = _BLANK.sub(lambda blank: escape(blanks[blank[1]]), sheet())
    meta = f'<meta http-equiv="content-security-policy" content="{"; ".join(policy)}">'
    written = f'<script type="text/plain" id="tape">{base64.b64encode(tape).decode()}</script>'
    return page.replace(POLICY_PLACE, meta).replace(TAPE_PLACE, written)


def front_page(base_url: str, model: str, max_model_len: int) -> str:
    """Return the page with endpoint, model and an example command."""
    base = base_url.rstrip("/")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    curl = f"curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    values = {"base": base, "model": model, "max_model_len": str(max_model_len), "curl": curl}
    page = _BLANK.sub(lambda blank: escape(values[blank[1]]), sheet())
    return page.replace(POLICY_PLACE, "").replace(TAPE_PLACE, "")


def _runs() -> tuple[str, ...]:
    return tuple(f"{kind}-src '{_hash(kind)}'" for kind in ("script", "style"))


def _hash(tag: str) -> str:
    content = sheet().partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
