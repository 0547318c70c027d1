"""The API key of a call, in any header that clients send it in. PURE."""

from collections.abc import Iterable

MAX_KEY_BYTES = 256


def authorization_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the value of `authorization`, or what it would be for the key in `x-api-key`, as clients of Anthropic's API send
    it; empty where there is neither. Header names are in lower case."""
    key = b""
    for name, value in headers:
        if name == b"authorization":
            return value
        if name == b"x-api-key":
            key = value
    return b"Bearer " + key if key else b""


def secret_in(authorization: bytes) -> str:
    """Return the key in the value of `authorization`; empty if there is none."""
    scheme, _, secret = authorization.strip().partition(b" ")
    is_key = scheme.lower() == b"bearer" and 0 < len(secret) <= MAX_KEY_BYTES
    return secret.strip().decode("latin-1") if is_key else ""
