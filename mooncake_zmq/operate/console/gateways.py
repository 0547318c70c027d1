"""Calls the gateways of a deployment: the first one that answers speaks for the cluster."""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.config.warnings import is_tls
from mooncake_zmq.gateway.http.tls import trusting

KEY_VARIABLE = "MOONCAKE_ZMQ_API_KEY"
"""The environment variable with the API key of an operator, for gateways that require one."""
TIMEOUT_S, CONNECT_S = 6.0, 2.0
SERVING = ("ok", "degraded")
NONE_CONFIGURED = "the deployment has no gateway"
NONE_OF_OURS = "what answers there is no gateway of ours"
EVERYWHERE = ("0.0.0.0", "::", "")


class NoGateway(Exception):
    """Raised when no gateway gave the answer; the message is one line."""


class Refused(NoGateway):
    """Raised when a gateway refused."""


class KeyNeeded(Refused):
    """Raised when a gateway answers operators only, and the request had no key or not an operator's."""


class Gateways:
    """The gateways of a deployment, in the order of its file."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        key: str = "",
        trust: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Create a client; `urls` holds the URL of each gateway by name."""
        self.urls = dict(urls)
        # Several gateways may share an address: a new connection may reach another one.
        headers = {"connection": "close", **({"authorization": f"Bearer {key}"} if key else {})}
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        self._client = httpx.Client(headers=headers, timeout=timeout, verify=trust, trust_env=False, transport=transport)

    @classmethod
    def of(cls, loaded: Loaded, *, ca: str = "") -> "Gateways":
        """Return a client of the gateways of a config; `ca` is a PEM file of trusted certificates. Raises ConfigError."""
        places = {node.name: place(loaded, node) for node in loaded.config.of_role("gateway")}
        return cls(places, key=os.environ.get(KEY_VARIABLE, ""), trust=trusted(loaded, ca))

    @classmethod
    def at(cls, url: str, *, ca: str = "") -> "Gateways":
        """Return a client of the gateway at `url`, whatever is configured here. Raises ConfigError."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: write http://{url} or https://{url}")
        return cls({url: url}, key=os.environ.get(KEY_VARIABLE, ""), trust=_trust(ca))

    def snapshot(self) -> tuple[str, Any]:
        """Return the name of the gateway that answered, and the state of the cluster. A gateway that drains or starts is used
        only if no other serves. Raises NoGateway."""
        last: tuple[str, Any] | None = None
        errors: list[str] = []
        for name in self.urls:
            try:
                last = name, self._cluster(name)
            except KeyNeeded:
                raise
            except NoGateway as error:
                errors.append(str(error))
                continue
            if last[1].get("status") in SERVING:
                return last
        if last is None:
            raise NoGateway("; ".join(errors) or NONE_CONFIGURED)
        return last

    def _cluster(self, name: str) -> Any:
        cluster = self._ask(name, "/cluster")
        if not isinstance(cluster, dict) or not cluster.keys() >= {"status", "nodes"}:
            raise NoGateway(f"{self._at(name)}: {NONE_OF_OURS}")
        return cluster

    def ask(self, path: str) -> tuple[str, Any]:
        """Return the name of the first gateway that answered, and its answer. Raises NoGateway."""
        return self._first(path, "GET", final=())

    def order(self, path: str, method: str) -> tuple[str, Any]:
        """Send a command to the first gateway that answers; return its name and answer. Raises NoGateway. If one refuses, the
        others are not tried, as they would refuse too."""
        return self._first(path, method, final=Refused)

    def _first(self, path: str, method: str, *, final: type[NoGateway] | tuple[()]) -> tuple[str, Any]:
        errors: list[str] = []
        for name in self.urls:
            try:
                return name, self._ask(name, path, method)
            except NoGateway as error:
                if isinstance(error, final):
                    raise
                errors.append(str(error))
        raise NoGateway("; ".join(errors) or NONE_CONFIGURED)

    def _ask(self, name: str, path: str, method: str = "GET") -> Any:
        try:
            answer = self._client.request(method, f"{self.urls[name].rstrip('/')}{path}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoGateway(f"{self._at(name)}: {error or type(error).__name__}") from None
        try:
            body = answer.json()
            if answer.status_code == httpx.codes.OK:
                return body
            reason = f"{name}: {answer.status_code} {body['error']['message']}"
        except (ValueError, LookupError, TypeError):
            said = f"{answer.status_code} {answer.reason_phrase}"
            raise NoGateway(f"{self._at(name)}: {NONE_OF_OURS} ({said})") from None
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise KeyNeeded(f"{self._at(name)} answers operators only: set {KEY_VARIABLE} to an operator's API key")
        if answer.status_code == httpx.codes.FORBIDDEN:
            raise KeyNeeded(reason)
        raise (Refused if answer.is_client_error else NoGateway)(reason)

    def _at(self, name: str) -> str:
        """Return the name and URL of a gateway for messages; one that is known by its URL only has that as its name."""
        url = self.urls[name]
        return url if name == url else f"{name} at {url}"

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


def place(loaded: Loaded, node: NodeSettings) -> str:
    """Return the URL of a gateway. If it listens on all addresses, that of its endpoint is used, if it has one. Raises
    ConfigError."""
    section = loaded.section(node)
    host = section.http_host
    if host in EVERYWHERE:
        tcp = node.endpoint.startswith("tcp://")
        host = node.endpoint.removeprefix("tcp://").rpartition(":")[0] if tcp else "127.0.0.1"
    scheme = "https" if is_tls(section) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{section.http_port}"


def trusted(loaded: Loaded, ca: str) -> ssl.SSLContext:
    """Return how gateways are verified: by the certificates in `ca`, by those of the config whose files are here, or
    by the system's trusted certificates. Raises ConfigError."""
    if ca:
        return _trust(ca)
    context: ssl.SSLContext | None = None
    for node in loaded.config.of_role("gateway"):
        path = Path(loaded.section(node).tls_certificate)
        try:
            if path.is_file():
                if context is None:
                    context = trusting(path)
                else:
                    context.load_verify_locations(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; --ca FILE names certificates to trust instead") from None
    return context or _trust(ca)


def _trust(ca: str) -> ssl.SSLContext:
    """Return the context for the certificates in `ca`; empty means those that the system trusts."""
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigError(f"{ca}: {error.strerror or error}") from None
