"""A host and an internet in two network namespaces with no uplink. Start at README.md."""

from tests.rig.internet import Arrival, Internet, Packet, Query
from tests.rig.origin import Mode
from tests.rig.rig import Rig, attached, sweep
from tests.rig.zone import Answer, Shape, answer

__all__ = ["Answer", "Arrival", "Internet", "Mode", "Packet", "Query", "Rig", "Shape", "answer", "attached", "sweep"]
