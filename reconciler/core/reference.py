"""Owns the table of what loosens, told from the schemas; the page for operators and the command's answer are one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reconciler.core.schema import leaves, load_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reconciler.core.schema import Node

KINDS = {"platform": "platform.yaml", "agent": "agents/NAME.yaml", "egress": "egress/NAME.yaml"}
PAGE = "docs/reference/weakenings.md"


def weakenings() -> str:
    """Write the page, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What weakens a policy"
    yield ""
    yield "Generated from the schemas: `ringfence explain --weakenings > docs/reference/weakenings.md`."
    yield ""
    yield "A change that loosens waits for a signed reason that grants it; every other change applies at once."
    yield "The default is the loosest value that needs no signature. What was ever set tighter stays so until a grant"
    yield "lifts it."
    for kind, file in KINDS.items():
        yield ""
        yield f"## {file}"
        yield ""
        yield "| field | default | loosens | signers | why |"
        yield "|---|---|---|---|---|"
        for pointer, node in leaves(load_schema(kind).root):
            if pointer and node.get("x-loosens") != "identity":
                yield _row(pointer, node)
    yield ""
    yield "The scope of an egress document, `/agents`, is compared agent by agent. `*` stands for those to come too: a"
    yield "document that stops selecting every agent (narrowed, renamed, deleted) goes on limiting whoever joins,"
    yield 'until a reason grants `{document: egress/NAME, field: /agents, remove: "*"}`, and again when that ends.'
    yield "One that stops selecting one agent goes on limiting that agent until a grant removes its name, or `*`."
    yield ""
    yield "An entry of `/allow` with a wildcard below which anybody can register (`*.github.io`) costs two signers."


def _row(pointer: str, node: Node) -> str:
    default = "—" if "default" not in node else f"`{json.dumps(node['default'])}`"
    approvals = node.get("x-approvals", 1)
    free = node.get("x-loosens") == "never"
    signers = "—" if free else "no number is enough" if approvals == "never" else str(approvals)
    return f"| `{pointer}` | {default} | {_told(node.get('x-loosens'))} | {signers} | {node.get('x-why', '')} |"


def _told(loosens: Any) -> str:
    match loosens:
        case "up":
            return "when it grows"
        case "down":
            return "when it shrinks"
        case {"flag": loose}:
            return f"when it becomes {json.dumps(loose)}"
        case {"chain": list(line)}:
            return f"towards the right: {', '.join(line)}"
        case {"set": _, "by": "adding"}:
            return "when an element is added"
        case {"set": _, "by": "removing"}:
            return "when an element is removed"
        case "adding-key":
            return "when a key is added"
        case "removing-key":
            return "when a key is removed"
        case "never":
            return "never: it says nothing about reach"
        case _:
            return "with every value but the default"
