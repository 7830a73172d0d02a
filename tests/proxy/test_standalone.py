"""What the proxy is made of: the standard library only, and little of it."""

from __future__ import annotations

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
