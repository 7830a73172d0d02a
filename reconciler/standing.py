"""Owns which approvals still stand by the trust files as they are now; verifies nothing, and lets nothing join."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from reconciler.core.grants import Approval
from reconciler.core.statement import ReasonRefused
from reconciler.core.trust import Trust
from reconciler.reason import permitted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.admission import Admission
    from reconciler.core.grants import Grant
    from reconciler.core.trust import Signer, TrustBroken


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What became of each admission that is remembered: its approval, or why it does not stand any more."""

    found: Mapping[Admission, Approval | ReasonRefused]

    @classmethod
    def of(cls, admissions: Iterable[Admission], trust: Trust | TrustBroken) -> Standing:
        """Judge them.

        While the trust files are broken what was admitted stands, but for what a line that can be read revokes.
        """
        signers = {one.key.fingerprint: one for one in trust.signers} if isinstance(trust, Trust) else {}
        return cls({one: _judged(one, trust, signers) for one in admissions})

    def ended(self, admission: Admission) -> ReasonRefused | None:
        """Say why an approval does not stand any more; None: it stands."""
        found = self.found[admission]
        return found if isinstance(found, ReasonRefused) else None

    def left(self, grants: tuple[Grant, ...]) -> tuple[Grant, ...]:
        """Give remembered grants with those of their approvals that stand; one without any is gone.

        Where nothing ended, they are the very same objects.
        """
        stand = {(one.id, one.key): found for one, found in self.found.items() if not isinstance(found, ReasonRefused)}
        left = []
        for grant in grants:
            found = (stand.get((grant.id, one.key)) for one in grant.approvals)
            approvals = tuple(sorted(one for one in found if one is not None))
            if approvals:
                left.append(grant if approvals == grant.approvals else dataclasses.replace(grant, approvals=approvals))
        same = len(left) == len(grants) and all(one is other for one, other in zip(left, grants, strict=True))
        return grants if same else tuple(left)


def _judged(
    admission: Admission, trust: Trust | TrustBroken, signers: Mapping[str, Signer]
) -> Approval | ReasonRefused:
    if admission.id in trust.revoked_ids:
        return ReasonRefused("id_revoked", f"is revoked by its id {admission.id}")
    if not isinstance(trust, Trust):
        if admission.key in trust.revoked_keys:
            return ReasonRefused("key_revoked", f"is signed with the revoked key {admission.key}")
        return Approval(admission.signer, admission.key)
    found = permitted(admission.key, signers.get(admission.key), trust, at=admission.admitted_at)
    return found if isinstance(found, ReasonRefused) else Approval(found.principal, admission.key)
