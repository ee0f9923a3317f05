"""Certificates and keys: an authority, a server certificate, and a key pair per site."""

from __future__ import annotations

import datetime as dt
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedscaffold.state.files import make_folder, write_private

__all__ = ["days_left", "make_authority", "make_secret", "make_server", "make_site_key"]

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
UNENCRYPTED = serialization.NoEncryption()


def make_authority(folder: Path, days: int) -> None:
    """Write ca.crt and ca.key; the key is only used to sign server certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("fedscaffold federation authority")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / "ca.key", key.private_bytes(PEM, PKCS8, UNENCRYPTED), secret=True)
    _write(folder / "ca.crt", certificate.public_bytes(PEM))


def make_server(authority: Path, folder: Path, hosts: Sequence[str], days: int) -> None:
    """Write server.crt and server.key for the host names and addresses that sites connect to."""
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(hosts[0]), issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    _write(folder / "server.key", key.private_bytes(PEM, PKCS8, UNENCRYPTED), secret=True)
    _write(folder / "server.crt", certificate.public_bytes(PEM))


def make_site_key(private: Path, public: Path) -> None:
    """Write a site's key pair on P-384 in OpenSSH format, as Flower's SuperNodes require."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write(
        private,
        key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, UNENCRYPTED),
        secret=True,
    )
    form = serialization.PublicFormat.OpenSSH
    _write(public, key.public_key().public_bytes(serialization.Encoding.OpenSSH, form) + b"\n")


def make_secret(path: Path) -> None:
    """Write the shared secret of the SuperLink and its SuperExec."""
    _write(path, secrets.token_bytes(32), secret=True)


def days_left(certificate: Path) -> float:
    """Return the days until a certificate expires; negative if it has expired."""
    end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    return (end - dt.datetime.now(dt.UTC)).total_seconds() / 86400


def _builder(
    subject: x509.Name, issuer: x509.Name, public: Any, days: int
) -> x509.CertificateBuilder:
    """Return a certificate builder with names, key, serial number and validity set."""
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=2))  # sites' clocks may be behind
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes, secret: bool = False) -> None:
    """Write a file that only its owner can read, or everybody unless `secret`."""
    make_folder(path.parent, private=True)
    write_private(path, data)
    if not secret:
        path.chmod(0o644)
