"""What a match has found so far, and where it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim
from sdpa_rewrite.algebra.term import Term

Number = Any  # bool, int, float or sympy.Expr


class Place(NamedTuple):
    """A term of the pattern and the term of the graph that is compared with it, each with its nodes."""

    expected: Term
    got: Term
    here: tuple[Node, ...]
    there: tuple[Node, ...]


class Summed(NamedTuple):
    """Axes that are summed (or normalised) over, and where."""

    mine: frozenset[Atom]
    theirs: frozenset[Atom]
    place: Place


class Equal(NamedTuple):
    """Two numbers that must be equal, and where they stand."""

    mine: Number
    theirs: Number
    place: Place


class Related(NamedTuple):
    """Two values of positions that must be equal (opposite, if ``negated``), and where they stand."""

    mine: Term
    theirs: Term
    negated: bool
    place: Place


class Found(NamedTuple):
    """What is known so far: pairs of a leaf of the pattern and what it stands for, of reductions, of indices.

    ``numbers``: those that must be equal once the sizes of the pattern's axes are known; ``relations``: values of
    positions that must be.
    """

    leaves: tuple[tuple[Term, Term], ...] = ()
    scalars: Mapping[str, Term] = MappingProxyType({})
    bound: tuple[Summed, ...] = ()
    indices: tuple[tuple[Dim, Dim], ...] = ()
    numbers: tuple[Equal, ...] = ()
    relations: tuple[Related, ...] = ()
    programs: Mapping[str, tuple[Term, Term]] = MappingProxyType({})  # name -> (what it is of, its value)
    operators: int = 0

    @property
    def size(self) -> int:
        """How many operators and parameters of the pattern that is."""
        return self.operators + len(self.leaves) + len(self.scalars) + len(self.programs)

    def another(self, **changes: Any) -> Found:
        """With one more operator."""
        return self._replace(operators=self.operators + 1, **changes)


class Obstacle(NamedTuple):
    """Where a match ended: how much of the pattern had been found, and why it did not go on.

    ``unread``: it is another operator, and nobody has looked at what it reads.
    """

    matched: int
    place: Place
    text: str
    unread: bool


def same_value(a: Term, b: Term) -> bool:
    """Whether two terms are one, or numbers that may be equal."""
    return a is b or (a.op == b.op == "number" and may_equal(a.attr, b.attr)) or (a.op == b.op and a.attr == b.attr)


def may_equal(a: Number, b: Number) -> bool:
    """Whether two numbers are equal but for rounding; where one has symbols, it may be."""
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a == b)
    if (isinstance(a, sympy.Basic) and a.free_symbols) or (isinstance(b, sympy.Basic) and b.free_symbols):
        return True
    x, y = float(a), float(b)
    return x == y or math.isclose(x, y, rel_tol=1e-5)
