"""Owns the `ringfence` command: which commands there are and how they exit; what each does is in `commands`."""

from __future__ import annotations

import sys

import typer

from reconciler.commands import audit, effective, guard, init, job, policy, probe, reason, status
from reconciler.commands.console import Code, complain

# typer exports one kind of usage error; what it is a kind of catches all of them.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def application() -> typer.Typer:
    """The tree of commands."""
    app = typer.Typer(
        name="ringfence",
        help="Runs code that you do not trust in a sandbox whose only way out is its own egress proxy, and proves it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.command("check")(policy.check)
    app.command("plan")(policy.plan)
    app.command("effective")(effective.effective)
    app.command("explain")(effective.explain)
    app.command("init")(init.init)
    app.command("probe")(probe.probe)
    app.command("reap")(probe.reap)
    app.command("run")(job.run)
    app.command("submit")(job.submit)
    app.command("status")(status.status)

    reasons = typer.Typer(help="Write, sign and verify signed reasons.", no_args_is_help=True)
    reasons.command("new")(reason.new)
    reasons.command("sign")(reason.sign)
    reasons.command("verify")(reason.verify)
    app.add_typer(reasons, name="reason")

    fence = typer.Typer(help="Print, load and check the host guard; keep a cluster's node guard.", no_args_is_help=True)
    fence.command("print")(guard.show)
    fence.command("load")(guard.load)
    fence.command("check")(guard.check)
    fence.command("pods")(guard.pods)
    app.add_typer(fence, name="guard")

    log = typer.Typer(help="Read and verify the audit log.", no_args_is_help=True)
    log.command("verify")(audit.verify)
    log.command("tail")(audit.tail)
    app.add_typer(log, name="audit")
    return app


def main() -> None:
    """Run one command; usage errors exit 64, so that no other status means two things."""
    try:
        status_code = application()(prog_name="ringfence", standalone_mode=False)
    except UsageError as error:
        context = getattr(error, "ctx", None)
        hint = f"\nTry '{context.command_path} --help'." if context is not None else ""
        # Its own words name the option or argument; its plain text does not.
        complain(f"{getattr(error, 'format_message', error.__str__)()}{hint}")
        sys.exit(Code.USAGE)
    except typer.Abort:
        sys.exit(130)
    sys.exit(status_code if isinstance(status_code, int) else Code.FINE)
