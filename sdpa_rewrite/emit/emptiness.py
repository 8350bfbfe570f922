"""Which logits are -inf whatever the score, and whether a row can consist of nothing else."""

from __future__ import annotations

import sympy

from sdpa_rewrite.algebra.axes import product
from sdpa_rewrite.algebra.term import Term, Terms, contains
from sdpa_rewrite.emit.affine import may_be_infinite
from sdpa_rewrite.emit.relations import predicate
from sdpa_rewrite.site import Site

BOUNDED_BELOW = frozenset({"tanh", "sigmoid", "erf", "sin", "cos", "atan", "exp", "sqrt", "relu", "abs", "softplus"})
FINITE_OF_FINITE = frozenset({"gelu", "silu", "elu", "leaky_relu", "asinh"})
MINUS_INFINITY = float("-inf")


class Unclear(Exception):
    """It depends on the score; the message says how."""


def empty_row(site: Site) -> Term | None:
    """A condition for rows whose logits are all -inf; None when there are none.  Raises ``Unclear``."""
    hole = site.terms.hole("score", site.scores_axes)
    empty = _minus_infinite(site, site.score, hole)
    if _is(empty, False) or _row_is_never_empty(site, empty):
        return None
    if site.sink is not None:
        empty = _both(site.terms, empty, _value_is_minus_infinite(site, site.sink))
    if _is(empty, False):
        return None
    return site.terms.reduce("all", empty, site.columns)


def _minus_infinite(site: Site, term: Term, hole: Term) -> Term:
    """Where ``term`` is -inf for every finite score."""
    terms = site.terms
    if term is hole:
        return terms.number(False)
    if not contains(term, hole):
        return _value_is_minus_infinite(site, term)
    if term.op == "where" and not contains(term.args[0], hole):
        condition, a, b = term.args
        yes, no = _minus_infinite(site, a, hole), _minus_infinite(site, b, hole)
        return _either(terms, _both(terms, condition, yes), _both(terms, terms.call("not", condition), no))
    return _through(site, term, hole, [_minus_infinite(site, a, hole) for a in term.args])


def _through(site: Site, term: Term, hole: Term, parts: list[Term]) -> Term:
    """What becomes of arguments that are -inf where ``parts`` say.

    Positions where the score is multiplied by infinity or divided by zero count too: a row of nothing but infinities
    and NaN is NaN, whatever their signs.
    """
    terms = site.terms
    name = term.op if term.op != "apply" else term.attr[0]._schema.name.split("::")[-1]
    if name in BOUNDED_BELOW:
        return terms.number(False)
    if name in ("add", "minimum"):
        return _either(terms, *parts)
    if name == "maximum":
        return _both(terms, *parts)
    if name in ("mul", "div") and not contains(term.args[1], hole):
        return _either(terms, parts[0], _blows_up(site, term.args[1], name))
    if name == "mul" and not contains(term.args[0], hole):
        return _either(terms, parts[1], _blows_up(site, term.args[0], name))
    if name in FINITE_OF_FINITE and all(_is(p, False) for p in parts):
        return terms.number(False)
    raise Unclear(f"whether a row is masked as a whole cannot be told behind {name}")


def _blows_up(site: Site, factor: Term, name: str) -> Term:
    terms = site.terms
    if name == "div":
        return terms.call("eq", factor, terms.number(0.0))
    if not may_be_infinite(site, factor):
        return terms.number(False)
    infinite = (terms.call("eq", factor, terms.number(sign * MINUS_INFINITY)) for sign in (1, -1))
    return _either(terms, *infinite)


def _value_is_minus_infinite(site: Site, term: Term) -> Term:
    """Where ``term``, which no score goes into, is -inf."""
    terms = site.terms
    if term.op == "number":
        return terms.number(term.attr == MINUS_INFINITY)
    if term.op == "where":
        condition, a, b = term.args
        yes, no = _value_is_minus_infinite(site, a), _value_is_minus_infinite(site, b)
        return _either(terms, _both(terms, condition, yes), _both(terms, terms.call("not", condition), no))
    if not may_be_infinite(site, term):
        return terms.number(False)
    return terms.call("eq", term, terms.number(MINUS_INFINITY))


def _is(term: Term, value: bool) -> bool:
    return term.op == "number" and isinstance(term.attr, bool) and term.attr is value


def _either(terms: Terms, a: Term, b: Term) -> Term:
    if _is(a, False) or _is(b, True):
        return b
    return a if _is(b, False) or _is(a, True) else terms.call("or", a, b)


def _both(terms: Terms, a: Term, b: Term) -> Term:
    if _is(a, True) or _is(b, False):
        return b
    return a if _is(b, True) or _is(a, False) else terms.call("and", a, b)


def _row_is_never_empty(site: Site, empty: Term) -> bool:
    """The first column, or the row's own, is visible in every row, by what is known of the indices."""
    masked = predicate(empty, site)
    band = masked.negated().bounds() if masked is not None else None
    if band is None:
        return False
    high, low = band
    if high is not None and (sympy.sympify(high) >= 0) != True:  # noqa: E712  (a relation of symbols is neither)
        return False
    if low is None:
        return True
    enough = sympy.sympify(product(site.columns)) >= sympy.sympify(product(site.rows))
    return bool((sympy.sympify(low) <= 0) == True and enough == True)  # noqa: E712
