"""Which positions a score program hides, and what is left of it elsewhere: for kernels that skip blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import sympy

from sdpa_rewrite.algebra.term import Term, Terms, contains, subterms
from sdpa_rewrite.emit.affine import ABSORBS, MASKS
from sdpa_rewrite.emit.relations import constant_cases, predicate
from sdpa_rewrite.site import Site

INFINITY = float("inf")


@dataclass(frozen=True)
class Layer:
    """One mask: where it hides (``hidden``), where it does nothing (``neutral``), and the logit that it leaves."""

    hidden: Term
    neutral: Term
    fill: float


@dataclass(frozen=True)
class Visibility:
    """The masks of a score program.

    ``bare`` is the program without them.  Nothing is visible but where low <= column - row <= high and, where there is
    a ``code``, where that is not 0; where it is 2 the program is ``bare``.  What is hidden has a probability of zero
    in every row that has a logit above ``floor``.
    """

    bare: Term
    floor: float = -INFINITY
    low: sympy.Basic | None = None
    high: sympy.Basic | None = None
    code: Term | None = None

    @property
    def hides(self) -> bool:
        """Whether anything is known."""
        return self.low is not None or self.high is not None or self.code is not None


def visibility(site: Site, score: Term, learned: frozenset[str]) -> Visibility:
    """What the masks of ``score`` hide; a mask that reads a ``learned`` capture is no mask but a bias."""
    hole = site.terms.hole("score", site.scores_axes)
    bare, layers = _peeled(site.terms, score, hole, learned)
    if not layers:
        return Visibility(score)
    low: sympy.Basic | None = None
    high: sympy.Basic | None = None
    scanned: list[Layer] = []
    for layer in (part for whole in layers for part in _apart(site.terms, whole)):
        hides = predicate(layer.hidden, site)
        band = hides.negated().bounds() if hides is not None else None
        if band is None or band == (None, None):
            scanned.append(layer)
            continue
        high = band[0] if high is None else high if band[0] is None else sympy.Min(high, band[0])
        low = band[1] if low is None else low if band[1] is None else sympy.Max(low, band[1])
    floor = max(layer.fill / 2 if math.isfinite(layer.fill) else -INFINITY for layer in layers)
    return Visibility(bare, floor, low, high, _code(site.terms, scanned))


def _apart(terms: Terms, layer: Layer) -> list[Layer]:
    """The masks that hide together what ``layer`` hides: a causal one, say, and one for padding."""
    if layer.neutral is not terms.call("not", layer.hidden):
        return [layer]
    return [Layer(h, terms.call("not", h), layer.fill) for h in _alternatives(terms, layer.hidden)]


def _alternatives(terms: Terms, condition: Term) -> list[Term]:
    """Conditions of which one at least holds where ``condition`` does."""
    inner = condition.args[0] if condition.op == "not" else condition
    if condition.op == "or":
        parts = condition.args
    elif condition.op == "not" and inner.op == "and":
        parts = tuple(terms.call("not", a) for a in inner.args)
    else:
        return [condition]
    return [h for part in parts for h in _alternatives(terms, part)]


def _code(terms: Terms, layers: list[Layer]) -> Term | None:
    if not layers:
        return None
    hidden = reduce(lambda a, b: terms.call("or", a, b), (x.hidden for x in layers))
    neutral = reduce(lambda a, b: terms.call("and", a, b), (x.neutral for x in layers))
    zero, one, two = (terms.number(float(n)) for n in range(3))
    return terms.call("where", hidden, zero, terms.call("where", neutral, two, one))


def _peeled(terms: Terms, term: Term, hole: Term, learned: frozenset[str]) -> tuple[Term, list[Layer]]:
    """``term`` without its masks, and those."""
    inner = [a for a in term.args if contains(a, hole)]
    if term is hole or len(inner) != 1 or (term.op == "where" and inner[0] is term.args[0]):
        return term, []
    bare, layers = _peeled(terms, inner[0], hole, learned)
    others = [a for a in term.args if a is not inner[0]]
    mask = _mask(terms, term, inner[0], learned)
    if mask is not None:
        return bare, [mask, *layers]
    if not layers:
        return term, []
    if term.op == "add" or (term.op == "maximum" and _at_most(others[0], ABSORBS)):
        return terms.call(term.op, bare, others[0]), layers
    factor = others[0].attr if others and others[0].op == "number" else None
    if term.op == "mul" and isinstance(factor, (int, float)) and 0 < factor < INFINITY:
        scaled = [Layer(x.hidden, x.neutral, x.fill * factor) for x in layers]
        if all(x.fill <= MASKS for x in scaled):
            return terms.call("mul", bare, others[0]), scaled
    return term, []


def _mask(terms: Terms, term: Term, inner: Term, learned: frozenset[str]) -> Layer | None:
    if any(t.op == "hole" and t.attr in learned for a in term.args if a is not inner for t in subterms(a)):
        return None
    if term.op == "where":
        condition, a, b = term.args
        fill, hidden = (b, terms.call("not", condition)) if a is inner else (a, condition)
        if not _at_most(fill, MASKS):
            return None
        return Layer(hidden, terms.call("not", hidden), float(fill.attr))
    if term.op != "add":
        return None
    (other,) = (a for a in term.args if a is not inner)
    cases = constant_cases(other)
    if cases is not None:  # a choice by index between two numbers
        condition, yes, no = cases
        if sorted((yes, no))[1] != 0 or min(yes, no) > MASKS:
            return None
        hidden = condition if yes < no else terms.call("not", condition)
        return Layer(hidden, terms.call("not", hidden), min(yes, no))
    if not _may_hide(other):
        return None
    hidden = terms.call("le", other, terms.number(MASKS))
    return Layer(hidden, terms.call("eq", other, terms.number(0.0)), MASKS)


def _at_most(term: Term, value: float) -> bool:
    return term.op == "number" and isinstance(term.attr, (int, float)) and term.attr <= value


def _may_hide(term: Term) -> bool:
    """Whether an addend looks like a mask: a tensor as it is, or something that a large number went into."""
    if term.op in ("hole", "float"):
        return term.op == "hole" or _may_hide(term.args[0])
    numbers = [t.attr for t in subterms(term) if t.op == "number" and isinstance(t.attr, (int, float))]
    return any(t.op == "hole" for t in subterms(term)) and any(abs(n) >= -MASKS for n in numbers)
