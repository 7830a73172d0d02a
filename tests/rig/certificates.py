"""Owns the rig's own certificate authority and the certificate of each host, made by the openssl program."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pathlib import Path

_HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}\Z")
_CURVE: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DEFAULT: Final = "default.invalid"


class Authority:
    """A certificate authority in a directory; makes a host's certificate when it is first asked for by SNI."""

    def __init__(self, directory: Path) -> None:
        """Make the authority; raises FileNotFoundError without openssl, CalledProcessError if it fails."""
        program = shutil.which("openssl")
        if program is None:
            raise FileNotFoundError("the rig needs the openssl program (Debian package openssl)")
        self._program = program
        self._directory = directory
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca.key"
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._asked: WeakKeyDictionary[ssl.SSLObject | ssl.SSLSocket, str] = WeakKeyDictionary()
        self._run(
            *("req", "-x509", *_CURVE, "-keyout", str(self._key), "-out", str(self.certificate), "-days", "7"),
            *("-subj", "/CN=ringfence rig CA", "-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
        self.context = self._context(_DEFAULT)
        self.context.sni_callback = self._choose
        self.retrying = self._made(_DEFAULT)
        self.retrying.set_ecdh_curve("secp384r1")
        self.retrying.sni_callback = self._choose

    def asked_for(self, connection: ssl.SSLObject) -> str | None:
        """Return the server name that the client of this connection sent, as sent."""
        return self._asked.get(connection)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _context: ssl.SSLContext) -> None:
        if name is not None:
            self._asked[connection] = name
        if name is not None and _HOST.match(name):
            connection.context = self._context(name.lower())

    def _context(self, name: str) -> ssl.SSLContext:
        if name not in self._contexts:
            chain, key = self._files(name)
            self._run(
                *("req", "-x509", *_CURVE, "-keyout", str(key), "-out", str(chain), "-days", "7"),
                *("-CA", str(self.certificate), "-CAkey", str(self._key), "-subj", "/CN=ringfence rig"),
                *("-addext", f"subjectAltName=DNS:{name}", "-addext", "basicConstraints=critical,CA:FALSE"),
                *("-addext", "extendedKeyUsage=serverAuth"),
            )
            self._contexts[name] = self._made(name)
        return self._contexts[name]

    def _made(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._files(name))
        return context

    def _files(self, name: str) -> tuple[Path, Path]:
        return self._directory / f"{name[:100]}.pem", self._directory / f"{name[:100]}.key"

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._program, *arguments], check=True, capture_output=True, timeout=20)
