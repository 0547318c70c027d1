"""A gateway's certificate and its key: read when it starts, and whenever a file of theirs changes. TLS 1.2 and newer.

Connections that stand keep what they began with. The files are opened once and looked at before OpenSSL gets them, so that
what was looked at is what is used.
"""

import os
import ssl
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import structlog

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.transfer.key_files import credential, identity_of, open_guarded

log = structlog.get_logger()

CERTIFICATE_CREDENTIAL, KEY_CREDENTIAL = "tls.crt", "tls.key"
SOON_DAYS = 14
"""The time before a certificate expires from which operators are warned."""
OTHERS_MAY_READ, OTHERS_MAY_WRITE = 0o004, 0o022


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a certificate and its key. `given`: systemd passed them, readable by an ACL that looks like a file
    permission."""

    certificate: Path
    key: Path
    given: bool = False


@dataclass(frozen=True, slots=True)
class Presented:
    """The part of a certificate that clients see. `names`: what it is for; `until`: seconds since 1970."""

    names: tuple[str, ...]
    until: float


class Tls:
    """`context` is for connections that begin; `refresh` is for the thread that looks at it."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises KeysError."""
        self._files = files
        self._seen = _identities(files)
        self.context = load(files)

    def refresh(self) -> None:
        """Follow a change of either file. As long as the files do not match or are invalid, the last context stays."""
        seen = _identities(self._files)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.context = load(self._files)
        except KeysError as error:
            log.warning("tls_unreadable", reason=str(error))
        else:
            log.info("tls_read", certificate=str(self._files.certificate))


def tls_files_of(certificate: str, key: str) -> TlsFiles | None:
    """Those of `gateway.tls_certificate` and `gateway.tls_key`, else the unit's credentials; None: there are none. Raises
    KeysError where one is without the other."""
    if certificate or key:
        return TlsFiles(Path(certificate), Path(key))
    found = credential(CERTIFICATE_CREDENTIAL), credential(KEY_CREDENTIAL)
    if found[0] is None or found[1] is None:
        if found != (None, None):
            raise KeysError(f"the unit has one of the credentials {CERTIFICATE_CREDENTIAL} and {KEY_CREDENTIAL}: give it both")
        return None
    return TlsFiles(found[0], found[1], given=True)


def load(files: TlsFiles) -> ssl.SSLContext:
    """Return the context for a gateway's TLS. Raises KeysError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    with ExitStack() as stack:
        paths = []
        for path, is_key in ((files.certificate, False), (files.key, True)):
            try:
                fd, state = open_guarded(path)
            except (OSError, KeysError) as error:
                raise KeysError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
            stack.callback(os.close, fd)
            if state.st_mode & OTHERS_MAY_WRITE and not files.given:
                raise KeysError(f"{path}: others can write it: chmod go-w it, and see that nothing foreign is in it")
            if is_key and state.st_mode & OTHERS_MAY_READ and not files.given:
                raise KeysError(f"{path}: everybody can read it: chmod o-r it, and have a new key certified")
            paths.append(f"/proc/self/fd/{fd}")
        try:
            context.load_cert_chain(paths[0], paths[1], password=_no_password)
        except ssl.SSLError as error:
            why = f"they are no PEM files of a certificate and its private key ({error.reason or 'not readable'})"
            if error.reason == "KEY_VALUES_MISMATCH":
                why = "the key is not that of the certificate"
            raise KeysError(f"{files.certificate} and {files.key}: {why}") from None
    return context


def trusting(certificate: Path) -> ssl.SSLContext:
    """A context for clients on this machine, which accepts exactly this certificate, for any name of the gateway."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def presented(files: TlsFiles) -> Presented:
    """Return what clients see of a certificate. A handshake in memory checks that they would accept it now. Raises
    KeysError."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = load(files).wrap_bio(outgoing, incoming, server_side=True)
    client = trusting(files.certificate).wrap_bio(incoming, outgoing)
    try:
        for side in (client, server, client, server):
            _go_on(side)
    except ssl.SSLCertVerificationError as error:
        raise KeysError(f"{files.certificate}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise KeysError(f"{files.certificate}: {error.reason}") from None
    certificate: Any = client.getpeercert() or {}
    names = tuple(str(name) for _, name in certificate.get("subjectAltName", ()))
    return Presented(names, ssl.cert_time_to_seconds(certificate["notAfter"]))


def _go_on(side: ssl.SSLObject) -> None:
    with suppress(ssl.SSLWantReadError):
        side.do_handshake()


def _no_password() -> NoReturn:
    """Fail instead of letting OpenSSL wait for a password at the terminal."""
    raise KeysError("the TLS key is encrypted: give an unencrypted one, which only the gateway's user can read")


def _identities(files: TlsFiles) -> tuple[tuple[int, int, int] | None, ...]:
    return tuple(map(_identity, (files.certificate, files.key)))


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        return identity_of(path)
    except OSError:
        return None


def days_left(until: float, now: float) -> int:
    """Return the whole days until the certificate expires; negative afterwards."""
    return int((until - now) // 86_400)
