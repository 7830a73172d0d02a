"""Owns `ringfence guard`: printing, loading and checking the host guard, and keeping a cluster's node guard."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import anyio
import typer

from reconciler.backends import guard as host_guard
from reconciler.backends import k8s_client, nft, pod_watch
from reconciler.commands.console import Code, complain, leave, say


def show() -> None:
    """Print the ruleset, for /etc/ringfence/guard.nft and the unit ringfence-guard.service."""
    typer.echo(nft.text(), nl=False)


def load() -> None:
    """Load the ruleset in place of what our table was, and read it back. It touches no other table."""
    _say(host_guard.load() if _is_root() else None)


def check() -> None:
    """Say whether the ruleset is in place exactly as it must be. Changes nothing."""
    _say(host_guard.check() if _is_root() else None)


def pods(
    node: Annotated[str, typer.Option(envvar="NODE_NAME", metavar="NAME", help="The node that this runs on.")],
    namespace: Annotated[str, typer.Option(metavar="NAME", help="The namespace of sandboxes.")] = "agent-sandbox",
    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Credentials; else those of the pod that this runs in.")
    ] = None,
) -> None:
    """Keep the node guard: this node's agents reach their proxies and nothing else, whatever network policies do.

    Runs until it is stopped, in the node's network namespace; deploy/k3s/sandbox/node-guard.yaml has it on every node.
    Who is fenced in stays so when it stops, until the run must be over.
    """
    _is_root()
    try:
        cluster = k8s_client.connect(namespace, kubeconfig=kubeconfig)
        anyio.run(lambda: pod_watch.keep(cluster, node, now=time.time, said=complain))
    except k8s_client.ClusterError as error:
        complain(str(error))
        leave(Code.PROBLEMS)
    except KeyboardInterrupt:
        leave(Code.FINE)


def _is_root() -> bool:
    if os.geteuid() != 0:
        complain("the kernel's rules are root's: run it as root")
        leave(Code.PROBLEMS)
    return True


def _say(failed: host_guard.GuardFailed | None) -> None:
    if failed is None:
        say(f"the host guard (table {nft.FAMILY} {nft.TABLE}) is in place")
        return
    for line in failed.lines:
        complain(line)
    leave(Code.PROBLEMS)
