"""Certificates for tests, signed by themselves."""

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mooncake_zmq.gateway.http.tls import TlsFiles


def make(directory: Path, name: str = "localhost", *, days: int = 30, password: bytes | None = None) -> TlsFiles:
    """`DIR/NAME.crt` and `DIR/NAME.key`. `days`: until it expires; negative where it has."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=90)).not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    files = TlsFiles(directory / f"{name}.crt", directory / f"{name}.key")
    files.certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    with open(os.open(files.key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(key.private_bytes(serialization.Encoding.PEM, form, encryption))
    return files
