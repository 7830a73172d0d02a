"""Owns what the process leaves unloaded: OpenSSL, 4 MB of memory, which asyncio and hmac would take along.

To be imported before them, and by the process's own entry only. No TLS is spoken here, and the two do without, as in a
Python that was built without OpenSSL; hmac then uses the interpreter's own SHA-256.
"""

from __future__ import annotations

import importlib
import sys

_OPENSSL = {"ssl", "_hashlib"} - sys.modules.keys()

for _name in _OPENSSL:
    # the import system takes None for "there is no such module" (Python's reference, section 5.3.1)
    sys.modules[_name] = None  # type: ignore[assignment]
for _name in ("asyncio", "hmac"):
    importlib.import_module(_name)
for _name in _OPENSSL:
    # whoever wants it later, uvloop for one, may have it
    del sys.modules[_name]
