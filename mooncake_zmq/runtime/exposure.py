"""What a gateway shows, and to whom: one judgement for the warnings of a start and for the doctor. No secret is told."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.runtime.api_keys import api_keys_of, read
from mooncake_zmq.runtime.tls import SOON_DAYS, TlsFiles, days_left, presented, tls_files_of
from mooncake_zmq.transfer.sockets import is_loopback

UNSEEN = " (credentials of its unit are not seen here)"


@dataclass(frozen=True, slots=True)
class Judgement:
    """`advice`: what helps; empty only where all is well. With a problem the gateway does not start, or would not again."""

    level: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def judged(*, http_host: str, api_keys: str, tls_certificate: str, tls_key: str) -> Iterator[Judgement]:
    """Of a gateway with these settings: who may call it, and what goes over the wire."""
    far = "" if is_loopback(f"tcp://{http_host}:0") else f"http_host {http_host} is not loopback"
    yield _callers(api_keys_of(api_keys), far)
    try:
        files = tls_files_of(tls_certificate, tls_key)
    except KeysError as error:
        yield Judgement("problem", str(error), "LoadCredential= for both in the unit")
    else:
        yield _in_clear(far) if files is None else _certificate(files, time.time())


def _callers(path: Path | None, far: str) -> Judgement:
    advice = "`mooncake-zmq keys api NAME --in FILE` makes the file"
    if path is not None:
        try:
            return Judgement("ok", f"{len(read(path))} API keys in {path}")
        except KeysError as error:
            return Judgement("problem", str(error), advice)
    if not far:
        return Judgement("ok", "no API keys, and it listens on this machine alone")
    found = f"{far}, and without gateway.api_keys whoever reaches it may call it, and see its metrics"
    return Judgement("warning", found, f"gateway.api_keys = FILE; {advice}{UNSEEN}")


def _in_clear(far: str) -> Judgement:
    if not far:
        return Judgement("ok", "HTTP, on this machine alone")
    found = f"{far}, and without gateway.tls_certificate what is asked and answered, and API keys, go in clear"
    return Judgement(
        "warning", found, f"gateway.tls_certificate and gateway.tls_key, or a proxy before it on this machine{UNSEEN}"
    )


def _certificate(files: TlsFiles, now: float) -> Judgement:
    """What clients would say of it."""
    try:
        shown = presented(files)
    except KeysError as error:
        return Judgement("problem", str(error), "put a new certificate and its key there; no restart is needed")
    left = days_left(shown.until, now)
    found = f"{files.certificate} for {', '.join(shown.names) or 'no name'}"
    if left >= SOON_DAYS:
        return Judgement("ok", f"{found}, good for {left} days")
    return Judgement(
        "warning", f"{found}, expires in {left} days", "have it renewed: the gateway reads the files anew when they change"
    )
