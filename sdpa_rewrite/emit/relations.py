"""Masks that are relations between the row and the column: causal, sliding window, prefix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import sympy

from sdpa_rewrite.algebra.axes import Dim
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.site import Site

ROW, COLUMN = sympy.symbols("row column", integer=True)


@dataclass(frozen=True)
class Predicate:
    """``relation`` of the symbols ROW and COLUMN holds where a position takes part."""

    relation: sympy.Basic

    def negated(self) -> Predicate:
        """The opposite."""
        """The positions that do not take part."""
        return Predicate(sympy.Not(self.relation))

    def conjuncts(self) -> tuple[sympy.Basic, ...]:
        """The parts that must all hold."""
        """The relations that must all hold."""
        relation = sympy.to_nnf(self.relation, simplify=False)
        return relation.args if isinstance(relation, sympy.And) else (relation,)

    def bounds(self) -> tuple[sympy.Basic | None, sympy.Basic | None] | None:
        """(largest, smallest) value of column - row, each None where free; None if it is no band along the diagonal."""
        high: sympy.Basic | None = None
        low: sympy.Basic | None = None
        for part in self.conjuncts():
            if part is sympy.true:
                continue
            edge = _edge(part)
            if edge is None:
                return None
            upper, value = edge
            if upper:
                high = value if high is None else sympy.Min(high, value)
            else:
                low = value if low is None else sympy.Max(low, value)
        return high, low

    def is_causal(self, rows: Dim, columns: Dim) -> bool:
        """Exactly ``column <= row``."""
        return self.bounds() == (sympy.Integer(0), None)

    def describe(self) -> str:
        """In words: causal, sliding window of w, or the relation itself."""
        band = self.bounds()
        if band is None:
            return f"relation {self.relation}"
        high, low = band
        if high is None and low is None:
            return "none"
        if high == 0 and low is None:
            return "causal"
        if high == 0 and low is not None:
            return f"causal, sliding window of {1 - low}"
        if low is None:
            return f"causal with offset {high}"
        return f"window {low} <= column - row <= {high}"


def _edge(part: sympy.Basic) -> tuple[bool, sympy.Basic] | None:
    """``column - row <= c`` as (True, c), ``column - row >= c`` as (False, c)."""
    if not isinstance(part, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return None
    difference = sympy.expand(part.lhs - part.rhs)
    slope = difference.coeff(COLUMN)
    rest = sympy.expand(difference - slope * (COLUMN - ROW))
    if slope not in (1, -1) or rest.has(ROW) or rest.has(COLUMN):
        return None
    strict = 1 if isinstance(part, (sympy.Lt, sympy.Gt)) else 0
    below = isinstance(part, (sympy.Le, sympy.Lt))
    # slope * (column - row) + rest <= 0, or < 0, or the reverse
    upper = below == (slope == 1)
    value = -rest * slope
    return (True, value - strict) if upper else (False, value + strict)


def predicate(condition: Term, site: Site) -> Predicate | None:
    """``condition`` as a relation of row and column; None when it reads anything else."""
    symbols = {tuple(site.rows): ROW, tuple(site.columns): COLUMN}
    try:
        value = _symbolic(condition, symbols)
    except (_Other, TypeError):
        return None
    if isinstance(value, bool):
        value = sympy.true if value else sympy.false
    return Predicate(value) if isinstance(value, sympy.logic.boolalg.Boolean) else None


class _Other(Exception):
    """Reads something that is no index."""


_SYMBOLIC: dict[str, Callable[..., sympy.Basic]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "le": sympy.Le,
    "lt": sympy.Lt,
    "and": sympy.And,
    "or": sympy.Or,
    "not": sympy.Not,
    "bool": lambda a: a,
    "int": lambda a: a,
}


def _symbolic(term: Term, symbols: dict[Dim, sympy.Symbol]) -> sympy.Basic:
    if term.op == "number":
        return sympy.sympify(term.attr)
    if term.op == "index":
        dim, start, step = term.attr
        if dim not in symbols:
            raise _Other
        return symbols[dim] * step + start
    if term.op in ("eq", "ne"):  # a truth value compared with a number
        cases = constant_cases(term)
        if cases is None:
            raise _Other
        condition, yes, no = cases
        inner = _symbolic(condition, symbols)
        if bool(yes) == bool(no):
            return sympy.true if yes else sympy.false
        return inner if yes else sympy.Not(inner)
    if term.op not in _SYMBOLIC:
        raise _Other
    return _SYMBOLIC[term.op](*(_symbolic(a, symbols) for a in term.args))


BOOLEAN = frozenset({"le", "lt", "and", "or", "not"})


def constant_cases(term: Term) -> tuple[Term, float, float] | None:
    """(condition, value if true, value if false) of a term that is constant but for one condition on indices."""
    conditions = _outermost_conditions(term)
    if len(set(conditions)) > 1:
        return None
    if any(t.op in ("leaf", "hole", "reduce", "index") for t in _outside(term, set(conditions))):
        return None
    try:
        if not conditions:
            value = _numeric(term, {})
            true = next((t for t in subterms(term) if t.op == "number"), term)
            return true, value, value
        condition = conditions[0]
        return condition, _numeric(term, {condition: 1.0}), _numeric(term, {condition: 0.0})
    except (_Other, TypeError, ValueError, OverflowError):
        return None


def _outermost_conditions(term: Term) -> list[Term]:
    if term.op in BOOLEAN:
        return [term] if any(t.op == "index" for t in subterms(term)) else []
    return [c for a in term.args for c in _outermost_conditions(a)]


def _outside(term: Term, conditions: set[Term]) -> list[Term]:
    if term in conditions:
        return []
    return [term, *(t for a in term.args for t in _outside(a, conditions))]


def _numeric(term: Term, values: dict[Term, float]) -> float:
    if term in values:
        return values[term]
    if term.op == "number":
        return float(term.attr)
    args = [_numeric(a, values) for a in term.args]
    table: dict[str, Callable[..., float]] = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b if a and b else 0.0 if math.isfinite(a) and math.isfinite(b) else math.nan,
        "where": lambda c, a, b: a if c else b,
        "float": lambda a: a,
        "int": lambda a: float(int(a)),
        "bool": lambda a: float(a != 0),
        "not": lambda a: float(not a),
        "eq": lambda a, b: float(a == b),
        "ne": lambda a, b: float(a != b),
        "maximum": max,
        "minimum": min,
    }
    if term.op not in table:
        raise _Other
    return table[term.op](*args)
