"""What the proxy is made of: the standard library only, and little of it."""

from __future__ import annotations

import hmac
import subprocess
import sys


def test_the_proxy_imports_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import proxy.main; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    modules = set(found.stdout.split()) - {"proxy"}
    assert modules <= set(sys.stdlib_module_names)
    assert not modules & {"urllib", "ipaddress", "http", "email", "encodings.idna", "ctypes"}


def test_openssl_stays_out_of_the_process_and_is_there_for_whoever_wants_it_later() -> None:
    program = (
        "import proxy.main, hmac, pathlib; from proxy.answer import proof; "
        "assert not any(name in pathlib.Path('/proc/self/maps').read_text() for name in ('libssl', 'libcrypto')); "
        "print(proof('/00112233445566778899aabbccddeeff', b'key').split()[-1].decode()); import ssl"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.strip() == hmac.new(b"key", b"00112233445566778899aabbccddeeff", "sha256").hexdigest()
