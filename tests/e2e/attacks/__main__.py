"""`python -m tests.e2e.attacks [--on TEXT] [--write]`: fight everywhere, print the table, and write docs/fence.md."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
from pathlib import Path

from tests.e2e.attacks import arena, control, report
from tests.e2e.attacks.table import Group
from tests.e2e.grounds import GROUNDS, Places
from tests.e2e.installation import Installation
from tests.rig import Rig
from tests.rig.docker import agent_image_tar, proxy_image_tar
from tests.rig.docker.fixtures import Images


def main() -> int:
    """Fight on every ground that is asked for; exit 1 when an attack came to something anywhere."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", default="", help="only grounds whose name holds this")
    parser.add_argument("--write", action="store_true", help="write docs/fence.md instead of printing")
    given = parser.parse_args()
    fought = [ground for ground in GROUNDS if ground.cluster is None]
    grounds = [ground for ground in fought if given.on in str(ground)]
    if given.write and len(grounds) < len(fought):
        parser.error("the page is about all of them: leave out --on")
    shown = control.run()
    rounds = {}
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images = functools.cache(
            lambda: Images(agent=agent_image_tar(place / "agent.tar"), proxy=proxy_image_tar(place / "proxy.tar"))
        )
        places = stack.enter_context(
            contextlib.closing(Places(functools.cache(lambda: stack.enter_context(Rig())), images))
        )
        for ground in grounds:
            with Installation(places.stand(ground)) as installation:
                rounds[ground] = arena.fight(installation)
            sys.stderr.write(f"{ground}: {rounds[ground].seconds:.0f} s\n")
    page = report.page(shown, rounds, {ground: report.versions(one) for ground, one in rounds.items()})
    if given.write:
        report.PAGE.write_text(page, "utf-8")
    else:
        sys.stdout.write(page)
    lost = [
        f"{ground}: {defeat}" for ground, one in rounds.items() for group in Group for defeat in one.defeats(group)
    ] + [f"{ground}: arrived: {what}" for ground, one in rounds.items() for what in one.arrivals]
    lost += [f"in the open: {each.name}: {shown[each.name]}" for each in arena.names() if not arena.opens(each, shown)]
    sys.stderr.write("".join(f"{line}\n" for line in lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
