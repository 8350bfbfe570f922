"""Score programs of the form ``scale * s + bias``, with positions filled by a constant: what SDPA can express."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from sdpa_rewrite.algebra.term import Term, Terms, contains, show
from sdpa_rewrite.emit.relations import Predicate, constant_cases, predicate
from sdpa_rewrite.site import Site

ABSORBS = -1e20  # s + fill == fill for every score of a sane size, in float32 and wider
MASKS = -1e4  # exp(fill - max) is zero in float32 whenever a row has an unmasked score of a sane size

HUGE = 1e30


class NotAffine(Exception):
    """The score program does more; the message says what."""


@dataclass(frozen=True)
class Fill:
    """``where(condition, value, scores)``."""

    condition: Term
    value: float

    @property
    def finite(self) -> bool:
        """Whether a row that is filled as a whole is uniform, not NaN."""
        return math.isfinite(self.value)

    @property
    def absorbs(self) -> bool:
        """Whether adding a score to the value changes nothing."""
        return self.value <= ABSORBS


@dataclass(frozen=True)
class Affine:
    """``scale * s + mask`` where nothing is filled; ``mask`` is the whole program at ``s = 0``.

    ``bias`` and ``fills`` are what it is made of, ``floor`` a finite minimum that all logits are raised to, and
    ``predicates`` those masks that are relations of the indices.
    """

    scale: Term
    mask: Term | None = None
    bias: tuple[Term, ...] = ()
    fills: tuple[Fill, ...] = ()
    floor: float | None = None
    predicates: tuple[Predicate, ...] = ()
    opaque: bool = False  # some mask is no relation of the indices

    def causal(self, site: Site) -> bool:
        """Whether the masks are exactly ``column <= row``."""
        return (
            bool(self.predicates)
            and not self.opaque
            and all(p.is_causal(site.rows, site.columns) for p in self.predicates)
        )


def affine(site: Site) -> Affine:
    """The score program of ``site`` in affine form.  Raises ``NotAffine``."""
    hole = site.terms.hole("score", site.scores_axes)
    return _with_predicates(site, _affine(site, site.score, hole))


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
    if term.op == "div" and term.args[0] is inner[0]:  # s / c -> s * (1 / c)
        return _scaled(site, x, terms.call("div", terms.number(1.0), others[0]))
    if term.op == "add":
        return _added(terms, x, others[0])
    if term.op == "where" and term.args[0] is not inner[0]:
        return _filled(terms, x, term, inner[0])
    if term.op == "maximum" and _number(others[0]) is not None and others[0].attr <= ABSORBS:
        return replace(x, mask=terms.call("maximum", _mask(terms, x), others[0]), floor=float(others[0].attr))
    name = term.op if term.op != "apply" else str(term.attr[0])
    raise NotAffine(f"the scores pass through {name}")


def _number(term: Term) -> float | None:
    return term.attr if term.op == "number" and isinstance(term.attr, (int, float)) else None


def _mask(terms: Terms, x: Affine) -> Term:
    return x.mask if x.mask is not None else terms.number(0.0)


def _added(terms: Terms, x: Affine, other: Term) -> Affine:
    cases = constant_cases(other)
    if cases is not None and cases[1] == 0 and cases[2] == 0:  # s + 0 -> s
        return x
    return replace(x, mask=terms.call("add", _mask(terms, x), other), bias=(*x.bias, other))


def _scaled(site: Site, x: Affine, factor: Term) -> Affine:
    terms = site.terms
    if factor.axes & set(site.columns):
        raise NotAffine("the scores are multiplied by a tensor that varies along the keys")
    if x.fills or x.floor is not None:
        value = _number(factor)
        if value is None or value <= 0 or any(f.finite for f in x.fills) or x.floor is not None:
            raise NotAffine("masked scores are multiplied")
    mask = terms.call("mul", x.mask, factor) if x.mask is not None else None
    bias = tuple(terms.call("mul", b, factor) for b in x.bias)
    return replace(x, scale=terms.call("mul", x.scale, factor), mask=mask, bias=bias)


def _filled(terms: Terms, x: Affine, term: Term, inner: Term) -> Affine:
    condition, a, b = term.args
    fill = b if a is inner else a
    value = _number(fill)
    if value is None:
        raise NotAffine(f"masked scores are replaced by {show(fill, 3)}")
    if not value <= MASKS:
        raise NotAffine(f"masked scores are replaced by {value}, which is not small enough to vanish")
    below = _mask(terms, x)
    mask = terms.call("where", condition, below, fill) if a is inner else terms.call("where", condition, fill, below)
    filled = terms.call("not", condition) if a is inner else condition
    return replace(x, mask=mask, fills=(*x.fills, Fill(filled, float(value))))


def _with_predicates(site: Site, x: Affine) -> Affine:
    """Find the masks that are relations of the indices."""
    found: list[Predicate] = []
    opaque = False
    for term in x.bias:
        cases = constant_cases(term)
        visible = predicate(cases[0], site) if cases is not None else None
        if cases is None or visible is None or min(cases[1:]) > MASKS or max(cases[1:]) != 0:
            opaque = True
        else:
            found.append(visible if cases[2] < cases[1] else visible.negated())
    for fill in x.fills:
        visible = predicate(fill.condition, site)
        if visible is None:
            opaque = True
        else:
            found.append(visible.negated())
    return replace(x, predicates=tuple(found), opaque=opaque)


def may_be_infinite(site: Site, term: Term) -> bool:
    """Whether ``term``, a mask, may hold -inf."""
    value = _number(term)
    if value is not None:
        return not math.isfinite(value)
    if term.op == "hole":
        capture = next(c for c in site.captures if c.name == term.attr)
        return may_be_infinite(site, capture.term)
    if term.op == "leaf":
        return bool(term.attr[0].meta["val"].dtype.is_floating_point)
    if term.op in ("float", "int", "bool", "index", "not", "and", "or", "eq", "ne", "lt", "le"):
        return any(may_be_infinite(site, a) for a in term.args) if term.op == "float" else False
    if term.op == "maximum":
        return all(may_be_infinite(site, a) for a in term.args)
    if term.op in ("add", "mul"):  # a huge number may overflow
        huge = any(abs(_number(a) or 0.0) > HUGE for a in term.args)
        return huge or any(may_be_infinite(site, a) for a in term.args)
    if term.op in ("minimum", "where"):
        return any(may_be_infinite(site, a) for a in term.args[len(term.args) - 2 :])
    return True


def may_mask(site: Site, term: Term) -> bool:
    """Whether ``term``, a bias, may push a score below what a fill leaves: then which of them is smaller matters."""
    value = _number(term)
    if value is not None:
        return abs(value) > -MASKS / 100
    if term.op == "hole":
        capture = next(c for c in site.captures if c.name == term.attr)
        return may_mask(site, capture.term)
    if term.op == "leaf":
        return bool(term.attr[0].meta["val"].dtype != torch.bool)
    if term.op in ("tanh", "not", "and", "or", "eq", "ne", "lt", "le", "bool"):
        return False
    if term.op == "where":
        return any(may_mask(site, a) for a in term.args[1:])
    return term.op != "index" and (not term.args or any(may_mask(site, a) for a in term.args))
