"""Owns how much may wait in the spool: which names are beyond their submitter's quota or the spool's depth.

Pure: looks at no directory and refuses nothing.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from reconciler.core.job import RefusalCode, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.spool import Waiting


def beyond(
    found: Iterable[Waiting], *, running: Mapping[str, int], quota: int, depth: int
) -> tuple[tuple[Waiting, ...], list[tuple[Waiting, Refused]]]:
    """Part what may wait from what is to be refused.

    Of one submitter at most `quota` jobs wait or run (`running` is by submitter), of all together at most `depth` wait.
    Who came first stays; beyond the depth whoever has most waiting gives up the newest first, so that a long queue of
    one costs no other a place.
    """
    queues: dict[str, list[Waiting]] = {}
    for one in sorted(found, key=lambda one: (one.arrived, one.name)):
        queues.setdefault(one.submitter.name, []).append(one)
    over: list[tuple[Waiting, Refused]] = []
    for name, queue in queues.items():
        places = max(0, quota - running.get(name, 0))
        advice = "submit again when some have ended, or have quota in host.yaml raised"
        message = f"{name} has {quota} jobs waiting or running, which is all that one submitter may: {advice}"
        over.extend((one, Refused(RefusalCode.OVER_QUOTA, message)) for one in queue[places:])
        del queue[places:]
    longest = [(-len(queue), name) for name, queue in queues.items() if queue]
    heapq.heapify(longest)
    for _ in range(sum(map(len, queues.values())) - depth):
        length, name = heapq.heappop(longest)
        message = f"{depth} jobs wait in the spool, which is all that may: submit again when some have ended"
        over.append((queues[name].pop(), Refused(RefusalCode.SPOOL_FULL, message)))
        if length < -1:
            heapq.heappush(longest, (length + 1, name))
    return tuple(one for queue in queues.values() for one in queue), over
