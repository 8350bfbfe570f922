"""match, adjoint and prove for one candidate: a certified site, or the reason why not."""

from __future__ import annotations

from torch.fx import Node

from sdpa_rewrite import adjoint, prove
from sdpa_rewrite.algebra.axes import Irregular, Refine
from sdpa_rewrite.lift.lifter import Axes
from sdpa_rewrite.match import Candidate, lift, site_of
from sdpa_rewrite.site import Miss, Site

RESTARTS = 64


def certified(candidate: Candidate, order: dict[Node, int]) -> Site:
    """The proved site behind ``candidate``.  Raises ``Miss``."""
    axes = Axes()
    for _ in range(RESTARTS):
        try:
            lifted = lift(candidate, axes)
            site = site_of(lifted)
            site = adjoint.complete(site, lifted.lifter, candidate, order)
            prove.forward(site)
            return site
        except Refine as refine:
            try:
                axes.split(refine)
            except Irregular as error:
                raise Miss(str(error), "layout", candidate.anchor) from error
    raise Miss("the axes do not settle", "layout", candidate.anchor)
