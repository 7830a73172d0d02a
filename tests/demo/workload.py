"""What the demo's job runs inside the sandbox: five attempts, one line each. Standard library only."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable


def https(url: str) -> str:
    """GET over CONNECT and TLS; urllib takes the proxy from the environment."""
    context = ssl.create_default_context(cafile="ca.pem")
    with urllib.request.urlopen(url, timeout=10, context=context) as answer:
        return f"{answer.status}"


def http(url: str) -> str:
    """GET over plain HTTP."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return f"{answer.status}"


def lookup(name: str) -> str:
    """Resolve a name past the proxy."""
    return str(socket.getaddrinfo(name, 443))


def direct(address: str) -> str:
    """Connect past the proxy."""
    with socket.create_connection((address, 80), timeout=3):
        return "connected"


def attempt(what: str, do: Callable[[str], str], target: str) -> None:
    """Try, and say in one line what came of it."""
    try:
        outcome = do(target)
    except urllib.error.HTTPError as error:
        outcome = f"{error.code} {error.reason}"
    except OSError as error:
        outcome = f"{error}"
    print(f"  {what:<34} {outcome}", flush=True)


attempt("a listed host, TLS", https, "https://api.vendor.com/invoices")
attempt("a listed host, plain HTTP", http, "http://api.vendor.com/invoices")
attempt("a host that is not listed", http, "http://evil.com/")
attempt("a name of the metadata service", http, "http://metadata.example.com/latest/meta-data/")
attempt("DNS, past the proxy", lookup, "api.vendor.com")
attempt("the metadata service, directly", direct, "169.254.169.254")
attempt("the vendor's address, directly", direct, "93.184.216.36")
