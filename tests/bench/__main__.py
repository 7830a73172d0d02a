"""Runs the benchmarks: `python -m tests.bench [NAME ...] [--quick]`; status 1 when a bound is not kept."""

from __future__ import annotations

import argparse
import sys

NAMES = ("policy", "bombs", "proxy", "run", "k8s")


def main() -> int:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all when none is named")
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds, nothing written, nothing judged"
    )
    parser.add_argument("--profile", action="store_true", help="of proxy: only where the time of a CONNECT goes")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no such benchmark: {unknown[0]}")
    chosen = options.names or NAMES
    failed = 0
    if "policy" in chosen:
        # each needs what the other does not
        from tests.bench import policy  # noqa: PLC0415

        failed |= policy.main()
    if "bombs" in chosen:
        from tests.bench import bombs  # noqa: PLC0415

        failed |= bombs.main()
    if "proxy" in chosen:
        from tests.bench.proxy import __main__ as proxy  # noqa: PLC0415

        failed |= proxy.main(quick=options.quick, only_profile=options.profile)
    if "run" in chosen:
        from tests.bench import run  # noqa: PLC0415

        failed |= run.main(quick=options.quick)
    if "k8s" in chosen:
        from tests.bench import k8s  # noqa: PLC0415 - as above

        failed |= k8s.main(quick=options.quick)
    return failed


if __name__ == "__main__":
    sys.exit(main())
