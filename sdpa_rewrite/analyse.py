"""match, adjoint and prove for one candidate: a certified site, or the reason why not."""

from __future__ import annotations

from torch.fx import Node

from sdpa_rewrite import adjoint, prove
from sdpa_rewrite.algebra.axes import Irregular, Refine
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.lift.lifter import Axes, Lifter
from sdpa_rewrite.match import Candidate, lift, site_of
from sdpa_rewrite.site import Miss, Site
from sdpa_rewrite.twins import Reading

RESTARTS = 64


def certified(candidate: Candidate, order: dict[Node, int]) -> Site:
    """The proved site behind ``candidate``.  Raises ``Miss``."""
    return analysed(candidate, order)[0]


def analysed(candidate: Candidate, order: dict[Node, int]) -> tuple[Site, Reading]:
    """The proved site behind ``candidate``, and what was read to find it.  Raises ``Miss``.

    A bias may be made of smaller tensors, and its gradient be read before it is summed for these: then it stays whole.
    """
    apart: list[Term] = []
    try:
        return _settled(candidate, order, apart)
    except Miss as miss:
        if not apart or miss.role not in ("backward", "escape"):
            raise
        try:
            return _settled(candidate, order, None)
        except Miss:
            raise miss from None


def _settled(candidate: Candidate, order: dict[Node, int], apart: list[Term] | None) -> tuple[Site, Reading]:
    axes = Axes()
    for _ in range(RESTARTS):
        try:
            lifted = lift(candidate, axes)
            site = site_of(lifted, apart)
            site = _completed(site, lifted.lifter, candidate, order)
            prove.forward(site)
            return site, _reading(candidate, lifted.lifter)
        except Refine as refine:
            try:
                axes.split(refine)
            except Irregular as error:
                raise Miss(str(error), "layout", candidate.anchor) from error
    raise Miss("the axes do not settle", "layout", candidate.anchor)


def _completed(site: Site, lifter: Lifter, candidate: Candidate, order: dict[Node, int]) -> Site:
    """``site`` with its backward.  Raises ``Miss``; a forward that differs explains more than its gradients do."""
    try:
        return adjoint.complete(site, lifter, candidate, order)
    except Miss as miss:
        if miss.role == "backward":
            prove.forward(site)
        raise


def _reading(candidate: Candidate, lifter: Lifter) -> Reading:
    opened = {n for (n, _), t in lifter.memo.items() if t.op != "leaf" or t.attr[0] is not n}
    return Reading(candidate.product, frozenset(opened), frozenset(lifter.interior | candidate.interior))
