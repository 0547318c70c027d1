"""The page a browser sees at the gateway's root: one file that asks the gateway for all it shows, and what it may do there."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

_BLANK = re.compile(r"\{\{(\w+)\}\}")


@cache
def sheet() -> str:
    """The page as it is written; blanks are outside its style and its script."""
    return (files("mooncake_zmq.gateway") / "page.html").read_text(encoding="utf-8")


@cache
def headers() -> Mapping[str, str]:
    """With which it is sent: it may run its own script and style, known by their hashes, and speak with its gateway alone."""
    policy = (
        "default-src 'none'",
        *(f"{kind}-src '{_hash(kind)}'" for kind in ("script", "style")),
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


def front_page(base_url: str, model: str, max_model_len: int) -> str:
    """With endpoint, model and a line to try it with."""
    base = base_url.rstrip("/")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    curl = f"curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    told = {"base": base, "model": model, "max_model_len": str(max_model_len), "curl": curl}
    return _BLANK.sub(lambda blank: escape(told[blank[1]]), sheet())


def _hash(tag: str) -> str:
    content = sheet().partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
