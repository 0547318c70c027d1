"""Permits calls of a gateway without API keys: from its own machine, or, by `gateway.allow_open`, from any host.

A page of any site can have a browser call a loopback address, and by a name that it moves there (DNS rebinding) read what
comes: such calls have another host's name, or another site's origin.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from mooncake_zmq.gateway.http.auth import is_below
from mooncake_zmq.gateway.openai.errors import RequestError, quoted

LOCAL = "localhost"
PASSED_ON = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Headers of proxies. One that sends none of them is nginx as it comes, which speaks HTTP/1.0."""
CLUSTER_PATHS = ("/cluster", "/trace")
"""Paths that show which prompts are cached and how much of each was reused, with all paths below them."""
READS = ("GET", "HEAD", "OPTIONS")
"""Methods without effects; a page of another site cannot read their answers."""


def check_caller(scope: Scope, headers: Mapping[str, str], *, allow_open: bool, origins: Sequence[str]) -> None:
    """Check any call where there are no keys. `origins`: sites whose pages may call. Raises RequestError."""
    if allow_open:
        if is_below(scope["path"], CLUSTER_PATHS) and not _is_of_this_machine(scope, headers):
            raise _refusal(f"without API keys {quoted(scope['path'])} is for callers on the gateway's own machine")
        return
    host, origin = headers.get("host", ""), headers.get("origin", "")
    if host and not _names_this_machine(host):
        why = f"without API keys this gateway is called by a loopback address or localhost, not as {quoted(host)}"
        raise _refusal(f"{why}: see gateway.api_keys and gateway.allow_open")
    may_ask = not origin or scope["method"] in READS or "*" in origins or origin in origins
    if not may_ask and not _is_own_page(origin, host):
        raise _refusal(f"pages of {quoted(origin)} may not call this gateway: see gateway.cors_origins")


def check_is_here(scope: Scope, headers: Mapping[str, str]) -> None:
    """Check a call that only operators may make: it comes from this machine, by a loopback address, from no proxy there and
    from no page of another site. Raises RequestError."""
    host, origin = headers.get("host", ""), headers.get("origin", "")
    foreign = bool(origin) and not _is_own_page(origin, host)
    if not _is_local(_client(scope)) or not _names_this_machine(host) or foreign or _is_passed_on(scope, headers):
        text = "without API keys this is for callers on the gateway's own machine, at a loopback address: see gateway.api_keys"
        raise _refusal(text)


def _refusal(text: str) -> RequestError:
    return RequestError(403, text, code="insufficient_permissions")


def _client(scope: Scope) -> str:
    client: Any = scope.get("client") or ("",)
    return str(client[0])


def _is_of_this_machine(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Return whether the caller is on this machine, at any of its addresses."""
    server: Any = scope.get("server") or (None,)
    client = _client(scope)
    return (_is_local(client) or client == server[0]) and not _is_passed_on(scope, headers)


def _is_passed_on(scope: Scope, headers: Mapping[str, str]) -> bool:
    return scope.get("http_version") == "1.0" or any(name in headers for name in PASSED_ON)


def _names_this_machine(host: str) -> bool:
    try:
        return _is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _is_own_page(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    try:
        return host == LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False
