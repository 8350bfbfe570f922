"""Score programs of the form ``scale * s + bias``, with positions filled by a constant: what SDPA can express."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sdpa_rewrite.algebra.term import Term, Terms, contains, show
from sdpa_rewrite.emit.relations import Predicate, constant_cases, predicate
from sdpa_rewrite.site import Site

ABSORBS = -1e20  # s + fill == fill for every score of a sane size, in float32 and wider
MASKS = -1e4  # exp(fill - max) is zero in float32 whenever a row has an unmasked score of a sane size


class NotAffine(Exception):
    """The score program does more; the message says what."""


@dataclass(frozen=True)
class Fill:
    """``where(condition, value, scores)``."""

    condition: Term
    value: float

    @property
    def absorbs(self) -> bool:
        return self.value <= ABSORBS


@dataclass(frozen=True)
class Affine:
    """``scale * s + sum(bias)``, then the fills; ``floor`` is a finite minimum that all logits are raised to."""

    scale: Term
    bias: tuple[Term, ...] = ()
    fills: tuple[Fill, ...] = ()
    floor: float | None = None
    predicates: tuple[Predicate, ...] = field(default=())

    def causal(self, site: Site) -> bool:
        """Whether the masks are exactly ``column <= row``."""
        return bool(self.predicates) and not self.bias and not self.fills and all(
            p.is_causal(site.rows, site.columns) for p in self.predicates
        )


def affine(site: Site) -> Affine:
    """The score program of ``site`` in affine form.  Raises ``NotAffine``."""
    hole = site.terms.hole("score", site.scores_axes)
    return _lift_masks(site, _affine(site, site.score, hole))


def _affine(site: Site, term: Term, hole: Term) -> Affine:
    terms = site.terms
    if term is hole:
        return Affine(terms.number(1.0))
    inner = [a for a in term.args if contains(a, hole)]
    if len(inner) != 1:
        raise NotAffine(f"the scores are used {len(inner)} times in {term.op}")
    x = _affine(site, inner[0], hole)
    others = [a for a in term.args if a is not inner[0]]
    if term.op == "mul":
        return _scaled(site, x, others[0])
    if term.op == "add":
        return Affine(x.scale, (*x.bias, others[0]), x.fills, x.floor)
    if term.op == "where" and term.args[0] is not inner[0]:
        return _filled(terms, x, term, inner[0])
    if term.op == "maximum" and others[0].op == "number" and others[0].attr <= ABSORBS:
        return Affine(x.scale, x.bias, x.fills, float(others[0].attr))
    name = term.op if term.op != "apply" else str(term.attr[0])
    raise NotAffine(f"the scores pass through {name}")


def _scaled(site: Site, x: Affine, factor: Term) -> Affine:
    terms = site.terms
    if factor.axes & set(site.columns):
        raise NotAffine("the scores are multiplied by a tensor that varies along the keys")
    if x.fills or x.floor is not None:
        positive = factor.op == "number" and isinstance(factor.attr, (int, float)) and factor.attr > 0
        if not positive or not all(math.isinf(f.value) for f in x.fills) or x.floor is not None:
            raise NotAffine("masked scores are multiplied")
    return Affine(
        terms.call("mul", x.scale, factor), tuple(terms.call("mul", b, factor) for b in x.bias), x.fills, x.floor
    )


def _filled(terms: Terms, x: Affine, term: Term, inner: Term) -> Affine:
    condition, a, b = term.args
    fill = b if a is inner else a
    if a is inner:
        condition = terms.call("not", condition)
    if fill.op != "number" or not isinstance(fill.attr, (int, float)):
        raise NotAffine(f"masked scores are replaced by {show(fill, 3)}")
    if fill.attr > MASKS:
        raise NotAffine(f"masked scores are replaced by {fill.attr}, which is not small enough to vanish")
    return Affine(x.scale, x.bias, (*x.fills, Fill(condition, float(fill.attr))), x.floor)


def _lift_masks(site: Site, x: Affine) -> Affine:
    """Separate masks that are relations of the indices: they need no tensor.  All-zero biases fold away."""
    bias: list[Term] = []
    fills: list[Fill] = []
    found: list[Predicate] = []
    for term in x.bias:
        cases = constant_cases(term)
        if cases is None:
            bias.append(term)
            continue
        condition, yes, no = cases
        if yes == 0 and no == 0:
            continue
        visible = predicate(condition, site)
        if visible is None or {yes, no} - {0.0} == set() or min(yes, no) > MASKS or max(yes, no) != 0:
            bias.append(term)
        else:
            found.append(visible if no < yes else visible.negated())
    for fill in x.fills:
        visible = predicate(fill.condition, site)
        if visible is None:
            fills.append(fill)
        else:
            found.append(visible.negated())
    whole = Affine(x.scale, tuple(bias), tuple(fills), x.floor, tuple(found))
    if not found or whole.causal(site):
        return whole
    return Affine(x.scale, x.bias, x.fills, x.floor, tuple(found))
