"""Owns the cluster's keys and certificates, made by the openssl program; one administrator for every part."""

from __future__ import annotations

import base64
import json
import subprocess
from typing import TYPE_CHECKING, Final

from tests.rig import network
from tests.rig.k8s.plan import API_SERVICE, NODE_ADDRESS

if TYPE_CHECKING:
    from pathlib import Path

_CURVE: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "7")


def make(place: Path) -> None:
    """Write ca.pem, apiserver.pem, admin.pem, accounts.pem, and a .key beside each, into a new directory.

    Raises CalledProcessError with openssl's words.
    """
    place.mkdir()
    _certificate(place, "ca", "/CN=rig", "basicConstraints=critical,CA:TRUE")
    names = f"DNS:kubernetes,DNS:kubernetes.default.svc,IP:{API_SERVICE},IP:{NODE_ADDRESS},IP:127.0.0.1"
    _certificate(place, "apiserver", "/CN=kube-apiserver", f"subjectAltName={names}", issuer="ca")
    _certificate(place, "admin", "/O=system:masters/CN=admin", "extendedKeyUsage=clientAuth", issuer="ca")
    # A certificate is the form that the API server reads a public key in.
    _certificate(place, "accounts", "/CN=service-accounts", "basicConstraints=critical,CA:FALSE")


def kubeconfig(place: Path, *, user: dict[str, str] | None = None) -> str:
    """Return a kubeconfig; `user` as one has it (`{"token": ...}`), the administrator if None."""
    admin = {f"client-{kind}-data": _encoded(place / f"admin.{suffix}") for kind, suffix in _PAIR}
    cluster = {"server": f"https://{NODE_ADDRESS}:6443", "certificate-authority-data": _encoded(place / "ca.pem")}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rig", "cluster": cluster}],
            "users": [{"name": "user", "user": admin if user is None else user}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": "user"}}],
            "current-context": "rig",
        }
    )


_PAIR: Final = (("certificate", "pem"), ("key", "key"))


def _certificate(place: Path, name: str, subject: str, extension: str, *, issuer: str | None = None) -> None:
    signed = () if issuer is None else ("-CA", str(place / f"{issuer}.pem"), "-CAkey", str(place / f"{issuer}.key"))
    made = ("-keyout", str(place / f"{name}.key"), "-out", str(place / f"{name}.pem"))
    _openssl("req", "-x509", *_CURVE, *made, *signed, "-subj", subject, "-addext", extension)


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _openssl(*arguments: str) -> None:
    subprocess.run([network.program("openssl"), *arguments], check=True, capture_output=True, timeout=20)
