"""What a program hole caught: a pointwise function of the pattern's value, of other tensors and of indices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Dims, Irregular, Window, atoms_of
from sdpa_rewrite.algebra.interpret import World, evaluate
from sdpa_rewrite.algebra.term import Term, show, subterms
from sdpa_rewrite.authoring.correspond import Unlike
from sdpa_rewrite.authoring.opener import Opener
from sdpa_rewrite.lift.lifter import CannotWindow, Lifter
from sdpa_rewrite.lift.ops import is_call


@dataclass(frozen=True)
class Body:
    """``term`` has the hole ``hole`` for the pattern's value, and a hole for each of ``captures``."""

    name: str
    term: Term
    hole: Term
    captures: Mapping[str, Term]

    def __str__(self) -> str:
        return show(self.term)

    def applied(self, world: World, x: Tensor, captured: Mapping[str, Tensor]) -> Tensor:
        """The program's value; ``x`` and the captures have one dimension per axis of ``world``."""
        fresh = copy.copy(world)
        fresh.values = {self.hole: x}
        for term in subterms(self.term):
            if term.op == "hole" and term is not self.hole:
                fresh.values[term] = captured[term.attr]
        return evaluate(self.term, fresh)


def body(opener: Opener, name: str, inner: Term, outer: Term) -> Body:
    """What stands between ``inner`` and ``outer``.  Raises ``Unlike``; ``Refine`` where an axis has to be split."""
    lifter = Lifter(opener.axes, set(_between(outer.attr[0], inner.attr[0])))
    lifter.terms = opener.terms
    lifter.close({inner.attr[0]})
    try:
        term = lifter.request(*outer.attr)
    except (Irregular, CannotWindow) as error:
        raise Unlike(f"the program {name} cannot be written in named axes: {error}") from error
    terms = opener.terms
    hole = terms.hole(name, inner.axes)
    term = terms.substitute(term, {inner: hole})
    _check_pointwise(name, term, hole)
    found: dict[Term, str] = {}
    _capture(term, lifter, name, found)
    holes = {t: terms.hole(n, t.axes) for t, n in found.items()}
    return Body(name, terms.substitute(term, holes), hole, {n: terms.leaf(*lifter.asked[t]) for t, n in found.items()})


def _between(outer: Node, inner: Node) -> Iterable[Node]:
    """The nodes that depend on ``inner`` and that ``outer`` depends on."""
    below, stack = {inner}, [inner]
    order = {n: k for k, n in enumerate(outer.graph.nodes)}
    while stack:
        for user in stack.pop().users:
            if user not in below and order[user] <= order[outer]:
                below.add(user)
                stack.append(user)
    return (n for n in below if is_call(n))


def _check_pointwise(name: str, term: Term, hole: Term) -> None:
    for t in subterms(term):
        if t.op in ("reduce", "cat", "part", "along") and any(x is hole for x in subterms(t)):
            raise Unlike(f"the program {name} is not pointwise")
        if t.op == "leaf" and not t.axes <= hole.axes:
            raise Unlike(f"the program {name} reads {t.attr[0].name} along an axis that its argument lacks")


def _capture(term: Term, lifter: Lifter, name: str, found: dict[Term, str]) -> None:
    """The largest parts that do not depend on a hole and that a tensor of the graph holds."""
    free = not any(t.op == "hole" for t in subterms(term))
    if free and (term.op == "number" or not any(t.op == "leaf" for t in subterms(term))):
        return
    if free and term in lifter.asked and _plain(lifter.asked[term][1]):
        found.setdefault(term, f"{name}.{len(found)}")
        return
    if not term.args:
        if free:
            raise Unlike(f"the program {name} reads a tensor that has no node of its own")
        return
    for arg in term.args:
        _capture(arg, lifter, name, found)


def _plain(dims: Dims) -> bool:
    return not any(isinstance(a, Window) for a in atoms_of(dims))
