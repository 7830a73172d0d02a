"""Owns the long run by hand: every target for a while, its new inputs kept, what breaks a promise shown."""

from __future__ import annotations

import argparse
import random
import secrets
import sys

from tests.proxy.fuzz.fuzzer import CORPUS, FoundError, Fuzzer
from tests.proxy.fuzz.targets import TARGETS


def main() -> int:
    """Run it; status 1 when something was found, which then lies in the corpus too."""
    parser = argparse.ArgumentParser(prog="python -m tests.proxy.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all when none is named")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of them together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="to do it again")
    options = parser.parse_args()
    chosen = options.targets or list(TARGETS)
    sys.stdout.write(f"seed {options.seed}\n")
    found = 0
    for name in chosen:
        try:
            fuzzer = Fuzzer(name, random.Random(options.seed))
            fuzzer.run(options.seconds / len(chosen))
        except FoundError as broken:
            found = 1
            (CORPUS / name).mkdir(parents=True, exist_ok=True)
            (CORPUS / name / f"found-{options.seed}").write_bytes(broken.data)
            sys.stdout.write(f"{name}: {broken.__cause__!r} by {broken.data!r}\n")
        else:
            sys.stdout.write(f"{name}: {fuzzer.tried} inputs, {fuzzer.save()} of them new in the corpus\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
