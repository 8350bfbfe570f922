"""What our kernels make of a weight program: a factor of each probability, and what is done to whole rows after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sdpa_rewrite.algebra.term import Term, Terms, contains, subterms
from sdpa_rewrite.emit.rows import row_factor
from sdpa_rewrite.site import Site

ROW_SUM = "row sum"
TRUTHS = frozenset({"eq", "ne", "lt", "le", "and", "or", "not", "bool"})


@dataclass(frozen=True)
class Weights:
    """A probability times ``factor``, times the ``share`` of its row.

    ``share`` may read the hole ``ROW_SUM``, the sum of a row's products of probability and factor.  ``nan_is_zero``:
    rows of NaN become 0 before that.
    """

    factor: Term
    share: Term
    row_sum: Term | None = None
    nan_is_zero: bool = False

    @property
    def trivial(self) -> bool:
        """Whether probabilities meet the values as they are, but for their row's share."""
        return self.factor.op == "number" and self.factor.attr == 1.0


def weights_of(site: Site) -> Weights | None:
    """The weight program of ``site``; None where it does anything else to a probability."""
    terms, hole = site.terms, site.terms.hole("probability", site.scores_axes)
    one, rows = terms.number(1.0), row_factor(site)
    if rows is not None:
        return Weights(one, rows)
    program = _without_nan_test(site, hole)
    nan_is_zero = program is not site.weight
    sums = [t for t in subterms(program) if t.op == "reduce" and contains(t, hole)]
    if not sums:
        found = _product(terms, program, hole, None)
        return Weights(found[0], one, None, nan_is_zero) if found else None
    if len(sums) > 1 or sums[0].attr[0] != "sum" or set(sums[0].attr[1]) != set(site.columns):
        return None
    summed = _product(terms, sums[0].args[0], hole, None)
    row_sum = terms.hole(ROW_SUM, sums[0].axes)
    found = _product(terms, terms.substitute(program, {sums[0]: row_sum}), hole, row_sum)
    if found is None or summed is None or found[0] is not summed[0] or found[1].axes & set(site.columns):
        return None
    return Weights(*found, row_sum, nan_is_zero)


def _product(terms: Terms, term: Term, hole: Term, row_sum: Term | None) -> tuple[Term, Term] | None:
    """What ``term`` multiplies ``hole`` by: a factor without, and one with ``row_sum``.  None where it does not."""
    if term is hole:
        return terms.number(1.0), terms.number(1.0)
    inner = [k for k, a in enumerate(term.args) if contains(a, hole)]
    rest = _product(terms, term.args[inner[0]], hole, row_sum) if len(inner) == 1 else None
    if rest is None:
        return None
    others = [a for k, a in enumerate(term.args) if k != inner[0]]
    summed = row_sum is not None and any(contains(a, row_sum) for a in others)
    args = [rest[summed] if k == inner[0] else a for k, a in enumerate(term.args)]
    blank = term.op == "where" and inner[0] > 0 and _is_zero(term.args[3 - inner[0]])
    if not (term.op == "mul" or (term.op == "div" and inner == [0]) or blank):
        return None
    found = terms.call(term.op, *args)
    return (rest[0], found) if summed else (found, rest[1])


def _without_nan_test(site: Site, hole: Term) -> Term:
    """The weight program without the tests that make NaN of a probability 0."""
    bounded = {c.name for c in site.captures if c.operand.node.meta["val"].dtype == torch.bool}

    def is_finite(term: Term) -> bool:
        if term.op == "number":
            return isinstance(term.attr, (int, float)) and math.isfinite(term.attr)
        if term.op == "float":
            return is_finite(term.args[0])
        return term.op in TRUTHS or (term.op == "hole" and term.attr in bounded)

    def is_multiple(term: Term) -> bool:
        """NaN exactly where the probability is, or 0 for another reason."""
        if term.op == "mul":
            return any(is_multiple(x) and is_finite(y) for x, y in (term.args, term.args[::-1]))
        if term.op == "where":
            return any(is_multiple(x) and _is_zero(y) for x, y in (term.args[1:], term.args[:0:-1]))
        return term is hole

    tests = {t: x for t in subterms(site.weight) if (x := _kept_from_nan(t)) is not None and is_multiple(x)}
    return site.terms.substitute(site.weight, tests)


def _kept_from_nan(term: Term) -> Term | None:
    """x, of a term that is x, and 0 where x is NaN."""
    if term.op != "where":
        return None
    condition, first, second = term.args
    if condition.op == "not":
        condition, first, second = condition.args[0], second, first
    if condition.op == "eq":  # what is NaN does not equal itself
        first, second = second, first
    isnan = condition.op == "apply" and condition.attr[0] is torch.ops.aten.isnan.default
    if (isnan or condition.op in ("eq", "ne")) and set(condition.args) == {second} and _is_zero(first):
        return second
    return None


def _is_zero(term: Term) -> bool:
    return term.op == "number" and term.attr == 0
