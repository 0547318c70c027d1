"""Judges how open a gateway is, for the warnings at its start and for the doctor. No secret is in the texts."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.gateway.http.api_keys import api_keys_of, read
from mooncake_zmq.gateway.http.tls import SOON_DAYS, TlsFiles, days_left, presented, tls_files_of
from mooncake_zmq.transfer.sockets import is_loopback

ADVICE = "gateway.api_keys = FILE, which `mooncake-zmq keys api NAME --in FILE` makes"
UNSEEN = " (credentials of its unit are not seen here)"


@dataclass(frozen=True, slots=True)
class Judgement:
    """`advice`: what helps; empty only where all is well. With a problem the gateway does not start, or would not again."""

    level: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def judged(*, http_host: str, api_keys: str, allow_open: bool, tls_certificate: str, tls_key: str) -> Iterator[Judgement]:
    """Findings on a gateway with these settings: its permitted callers, and what goes over the wire."""
    far = _far(http_host)
    yield _callers(api_keys_of(api_keys), far, allow_open)
    try:
        files = tls_files_of(tls_certificate, tls_key)
    except KeysError as error:
        yield Judgement("problem", str(error), "LoadCredential= for both in the unit")
    else:
        yield _in_clear(far) if files is None else _certificate(files, time.time())


def unasked(*, http_host: str, api_keys: str, allow_open: bool) -> str:
    """The reason why a gateway with these settings must not start: any host could call it, and `allow_open` is not set.
    Empty: there is none."""
    far = _far(http_host)
    if not far or allow_open or api_keys_of(api_keys) is not None:
        return ""
    open_to_all = "or, where every client that reaches it may call it, gateway.allow_open = true"
    return f"{far}, and there are no API keys: {ADVICE}, {open_to_all}"


def _far(http_host: str) -> str:
    """Empty: it is reached from this machine alone."""
    return "" if is_loopback(f"tcp://{http_host}:0") else f"http_host {http_host} is not loopback"


def _callers(path: Path | None, far: str, allow_open: bool) -> Judgement:
    if path is not None:
        try:
            return Judgement("ok", f"{len(read(path))} API keys in {path}")
        except KeysError as error:
            return Judgement("problem", str(error), ADVICE)
    if not far and not allow_open:
        return Judgement("ok", "no API keys, and it listens on this machine alone")
    if not allow_open:
        return Judgement("problem", f"{far}, and there are no API keys: it will not start", f"{ADVICE}{UNSEEN}")
    who = "every client that reaches it may call it and read its metrics"
    found = f"{far or 'gateway.allow_open'}, and without gateway.api_keys {who}"
    return Judgement("warning", found, f"{ADVICE}{UNSEEN}")


def _in_clear(far: str) -> Judgement:
    if not far:
        return Judgement("ok", "HTTP, on this machine alone")
    found = f"{far}, and without gateway.tls_certificate what is asked and answered, and API keys, go in clear"
    return Judgement(
        "warning", found, f"gateway.tls_certificate and gateway.tls_key, or a proxy before it on this machine{UNSEEN}"
    )


def _certificate(files: TlsFiles, now: float) -> Judgement:
    """Problems with the certificate that clients would find."""
    try:
        shown = presented(files)
    except KeysError as error:
        return Judgement(
            "problem", str(error), "put a new certificate and its key there; a gateway that runs reads them without a restart"
        )
    left = days_left(shown.until, now)
    found = f"{files.certificate} for {', '.join(shown.names) or 'no name'}"
    if left >= SOON_DAYS:
        return Judgement("ok", f"{found}, good for {left} days")
    return Judgement(
        "warning", f"{found}, expires in {left} days", "have it renewed: the gateway reads the files anew when they change"
    )
