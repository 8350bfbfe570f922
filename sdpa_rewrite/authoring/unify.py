"""A pattern against a graph: which tensor of the graph each parameter of the pattern is.

Both are opened from the result down, operator by operator.  Sums and products are unordered, numbers in them are
folded, and a factor may sit on any side of a contraction.  Axes are not compared here: ``axes`` finds the
correspondence of axes that the bindings imply, and the proof has the last word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim
from sdpa_rewrite.algebra.term import COMMUTATIVE, Term
from sdpa_rewrite.authoring.hole import is_program, program_name
from sdpa_rewrite.authoring.opener import Opener
from sdpa_rewrite.authoring.parameters import Parameter
from sdpa_rewrite.authoring.relation import of_positions
from sdpa_rewrite.lift.ops import is_call, opname, value_of

EFFORT = 4000  # comparisons that one attempt may cost
Number = Any  # bool, int, float or sympy.Expr


@dataclass(frozen=True)
class Found:
    """What is known so far: pairs of a leaf of the pattern and what it stands for, of reductions, of indices.

    ``numbers``: pairs of numbers that must be equal once the sizes of the pattern's axes are known.
    """

    leaves: tuple[tuple[Term, Term], ...] = ()
    scalars: Mapping[str, Term] = field(default_factory=dict)
    bound: tuple[tuple[frozenset[Atom], frozenset[Atom]], ...] = ()
    indices: tuple[tuple[Dim, Dim], ...] = ()
    numbers: tuple[tuple[Number, Number], ...] = ()
    relations: tuple[tuple[Term, Term, bool], ...] = ()  # values of positions that must be equal, or opposite
    programs: Mapping[str, tuple[Term, Term]] = field(default_factory=dict)  # name -> (what it is of, its value)


@dataclass(frozen=True)
class Obstacle:
    """Where a match ended: how many operators of the pattern had been found, what was wanted, what is there."""

    matched: int
    expected: Term
    got: Term
    text: str


@dataclass
class Unifier:
    """One attempt: the pattern's opener and parameters, the graph's opener."""

    pattern: Opener
    parameters: Mapping[Node, Parameter]
    roots: tuple[Term, ...]
    graph: Opener
    obstacle: Obstacle | None = None
    matched: set[Node] = field(default_factory=set)  # nodes of the pattern that something in the graph was found for
    effort: int = 0

    def unify(self, p: Term, g: Term, found: Found, depth: int = 0) -> Iterator[Found]:
        """Every way in which ``g`` is what the pattern has at ``p``, as far as operators tell."""
        self.effort += 1
        if self.effort > EFFORT:
            return
        parameter = self._parameter(p)
        if parameter is not None:
            yield from self._bind(parameter, p, g, found, depth)
            return
        if p.op == "number":
            yield from self._number(p, g, found, depth)
            return
        whole = self.pattern.whole(p)
        if of_positions(whole):
            yield from self._relation(p, g, found, depth)
            return
        soft = self.pattern.softmax(p)
        if soft is not None:
            theirs = self.graph.softmax(g)
            if theirs is None or theirs.safe != soft.safe:
                self._fail(depth, p, g, "no softmax" if theirs is None else "softmax and safe softmax differ")
                return
            self._found(p)
            bound = (*found.bound, (soft.axes, theirs.axes))
            yield from self.unify(soft.logits, theirs.logits, replace(found, bound=bound), depth + 1)
            return
        top = self.pattern.open(p)
        if is_program(top):
            yield from self._program(top, g, found, depth)
        elif top.op in ("mul", "div") or self._scaled_contraction(top):
            yield from self._product(p, g, found, depth)
        elif top.op == "add":
            yield from self._sum(p, g, found, depth)
        elif top.op == "where":
            yield from self._where(p, top, g, found, depth)
        elif top.op in ("not", "ne"):
            yield from self._condition(p, g, False, found, depth)
        else:
            yield from self._operator(p, top, g, found, depth)

    def _parameter(self, p: Term) -> Parameter | None:
        return self.parameters.get(p.attr[0]) if p.op == "leaf" else None

    def _found(self, p: Term) -> None:
        if p.op == "leaf":
            self.matched.add(p.attr[0])

    def _fail(self, depth: int, p: Term, g: Term, text: str) -> None:
        if self.obstacle is None or depth >= self.obstacle.matched:
            self.obstacle = Obstacle(depth, p, g, text)

    # -- leaves ---------------------------------------------------------------------------------------------

    def _bind(self, parameter: Parameter, p: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        if parameter.kind == "scalar":
            known = found.scalars.get(parameter.name)
            if (g.op == "number" or (g.op == "leaf" and not g.axes)) and (known is None or _same(known, g)):
                self._found(p)
                yield replace(found, scalars={**found.scalars, parameter.name: g})
            else:
                self._fail(depth, p, g, "no number, or not the same one again")
            return
        if g.op != "leaf":
            self._fail(depth, p, g, "no tensor of the graph")
            return
        dtype = value_of(g.attr[0]).dtype
        if not (dtype.is_floating_point if parameter.dtype is None else dtype == parameter.dtype):
            self._fail(depth, p, g, f"of type {dtype}, not {parameter.dtype or 'a floating type'}")
            return
        known = next((there for here, there in found.leaves if here.attr[0] is p.attr[0]), None)
        if known is not None and known.attr[0] is not g.attr[0]:
            self._fail(depth, p, g, f"{parameter.name} is {known.attr[0].name} elsewhere")
            return
        self._found(p)
        yield replace(found, leaves=(*found.leaves, (p, g)))

    def _number(self, p: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        number = g if g.op == "number" else self.graph.open(g)
        if number.op == "number" and may_equal(p.attr, number.attr):
            yield replace(found, numbers=(*found.numbers, (p.attr, number.attr)))
        else:
            self._fail(depth, p, g, f"not the number {p.attr}")

    # -- operators ------------------------------------------------------------------------------------------

    def _operator(self, p: Term, top: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        other = self.graph.open(g)
        if other.op != top.op or len(other.args) != len(top.args) or not self._same_kind(top, other):
            self._fail(depth, p, g, f"no {kind_of(top)}")
            return
        self._found(p)
        if top.op == "reduce":
            found = replace(found, bound=(*found.bound, (frozenset(top.attr[1]), frozenset(other.attr[1]))))
        if top.op == "index":
            yield replace(found, indices=(*found.indices, (top.attr[0], other.attr[0])))
            return
        orders = itertools.permutations(other.args) if top.op in COMMUTATIVE else iter((other.args,))
        for args in orders:
            yield from self._each(top.args, args, found, depth + 1)

    def _same_kind(self, p: Term, g: Term) -> bool:
        if p.op == "leaf":
            return False  # an operator that cannot be read
        if p.op == "reduce":
            return bool(p.attr[0] == g.attr[0])
        if p.op == "index":
            return bool(p.attr[1:] == g.attr[1:])
        return p.op not in ("apply", "hole", "cat", "part", "along") or bool(p.attr == g.attr)

    def _each(self, ps: Sequence[Term], gs: Sequence[Term], found: Found, depth: int) -> Iterator[Found]:
        if not ps:
            yield found
            return
        for first in self.unify(ps[0], gs[0], found, depth):
            yield from self._each(ps[1:], gs[1:], first, depth + 1)

    # -- conditions -----------------------------------------------------------------------------------------

    def _relation(self, p: Term, g: Term, found: Found, depth: int, negated: bool = False) -> Iterator[Found]:
        """A value that is made of positions only: which, is compared when the axes are known."""
        whole = self.graph.whole(g)
        if of_positions(whole):
            relation = (self.pattern.whole(p), whole, negated)
            yield replace(found, relations=(*found.relations, relation))
        else:
            self._fail(depth, p, g, "not made of positions only")

    def _where(self, p: Term, top: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        """where(c, a, b) is where(not c, b, a)."""
        other = self.graph.open(g)
        if other.op != "where":
            self._fail(depth, p, g, "no where")
            return
        condition, yes, no = other.args
        for negated, branches in ((False, (yes, no)), (True, (no, yes))):
            for first in self._condition(top.args[0], condition, negated, found, depth + 1):
                yield from self._each(top.args[1:], branches, first, depth + 1)

    def _condition(self, p: Term, g: Term, negated: bool, found: Found, depth: int) -> Iterator[Found]:
        """A condition, or its opposite if ``negated``."""
        if of_positions(self.pattern.whole(p)):
            yield from self._relation(p, g, found, depth, negated)
            return
        mine, one = self._plain(self.pattern, p)
        theirs, other = self._plain(self.graph, g)
        if (one != other) != negated:
            self._fail(depth, p, g, "the opposite condition")
        elif mine is p and self.pattern.open(p).op in ("not", "ne"):
            yield from self._operator(p, self.pattern.open(p), theirs, found, depth)
        else:
            yield from self.unify(mine, theirs, found, depth)

    def _plain(self, opener: Opener, term: Term) -> tuple[Term, bool]:
        """A condition without its negations, and whether their number is odd.  x == 0 is a negation of x."""
        odd = False
        while self._parameter(term) is None:
            top = opener.open(term)
            if top.op == "not":
                term, odd = top.args[0], not odd
                continue
            zero = next(
                (a for a in top.args if a.op == "number" and not isinstance(a.attr, bool) and a.attr == 0), None
            )
            other = next((a for a in top.args if a is not zero), None)
            if top.op not in ("eq", "ne") or zero is None or other is None or not _is_truth(opener, other):
                break
            term, odd = other, odd != (top.op == "eq")
        return term, odd

    # -- sums -----------------------------------------------------------------------------------------------

    def _sum(self, p: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        wanted, constant = self._addends(self.pattern, p)
        for given, theirs in self._sums(g, len(wanted)):
            if len(given) == len(wanted) and may_equal(constant, theirs):
                self._found(p)
                fresh = replace(found, numbers=(*found.numbers, (constant, theirs)))
                yield from self._assign(wanted, given, fresh, depth + 1)
        self._fail(depth, p, g, "no sum of this many parts")

    def _addends(self, opener: Opener, term: Term) -> tuple[list[Term], Number]:
        """All addends, and the numbers among them added up."""
        if term.op == "number":
            return [], term.attr
        if self._parameter(term) is None:
            top = opener.open(term)
            if top.op == "add":
                parts = [self._addends(opener, a) for a in top.args]
                return [t for ts, _ in parts for t in ts], sum(c for _, c in parts)
        return [term], 0

    def _sums(self, g: Term, count: int) -> Iterator[tuple[list[Term], Number]]:
        """``g`` as a sum of up to ``count`` parts, taken apart no further than it has to be."""

        def parts(open_ones: list[Term], constant: Number, start: int) -> Iterator[tuple[list[Term], Number]]:
            yield open_ones, constant
            if len(open_ones) > count:
                return
            for k in range(start, len(open_ones)):
                top = self.graph.open(open_ones[k])
                if top.op == "add":
                    terms = [a for a in top.args if a.op != "number"]
                    more = sum(a.attr for a in top.args if a.op == "number")
                    yield from parts([*open_ones[:k], *terms, *open_ones[k + 1 :]], constant + more, k)

        yield from parts([g], 0, 0)

    def _assign(self, ps: list[Term], gs: list[Term], found: Found, depth: int) -> Iterator[Found]:
        """Pair off the parts of two sums; parameters last, since they fit anything."""
        ps = sorted(ps, key=lambda p: self._parameter(p) is not None)
        if not ps:
            if not gs:
                yield found
            return
        for k, g in enumerate(gs):
            for first in self.unify(ps[0], g, found, depth):
                yield from self._assign(ps[1:], [*gs[:k], *gs[k + 1 :]], first, depth + 1)

    # -- products -------------------------------------------------------------------------------------------

    def _scaled_contraction(self, top: Term) -> bool:
        return top.op == "reduce" and top.attr[0] == "sum" and bool(_peel(self.pattern, top, self._is_scalar))

    def _is_scalar(self, term: Term) -> bool:
        parameter = self._parameter(term)
        return parameter is not None and parameter.kind == "scalar"

    def _product(self, p: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        factors = _Factors.of(self.pattern, p, self.parameters, self._is_scalar)
        scalars = [f for f in factors.items if self._is_scalar(f.term)]
        rest = sorted((f for f in factors.items if f not in scalars), key=lambda f: self._parameter(f.term) is not None)
        ways = _expansions(self.graph, g, len(rest) + len(scalars))
        if scalars:  # a number that is there is the scalar, rather than a part of an operand
            ways = iter(sorted(ways, key=lambda way: not way.items or may_equal(way.number, 1)))
        for given in ways:
            for left, fresh in self._pair_factors(rest, list(given.items), found, depth + 1):
                self._found(p)
                yield from self._scalars(scalars, factors.number, left, given.number, fresh)
        self._fail(depth, p, g, "no product of these factors")

    def _pair_factors(
        self, ps: list[_Factor], gs: list[_Factor], found: Found, depth: int
    ) -> Iterator[tuple[list[_Factor], Found]]:
        if not ps:
            yield gs, found
            return
        for k, g in enumerate(gs):
            if g.below != ps[0].below:
                continue
            for first in self.unify(ps[0].term, g.term, found, depth):
                yield from self._pair_factors(ps[1:], [*gs[:k], *gs[k + 1 :]], first, depth + 1)

    def _scalars(
        self, scalars: list[_Factor], mine: Number, left: list[_Factor], theirs: Number, found: Found
    ) -> Iterator[Found]:
        """What is left over in the graph's product is what the pattern's scalars stand for; 1 where nothing is."""
        if not scalars:
            if not left and may_equal(mine, theirs):
                yield replace(found, numbers=(*found.numbers, (mine, theirs)))
            return
        first, *others = scalars
        name = self.parameters[first.term.attr[0]].name
        known = found.scalars.get(name)
        if known is not None and known.op == "number":
            factor = 1 / known.attr if first.below else known.attr
            yield from self._scalars(others, mine * factor, left, theirs, found)
            return
        for k, g in enumerate(left):
            if not g.term.axes and g.below == first.below and (known is None or known is g.term):
                bound = replace(found, scalars={**found.scalars, name: g.term})
                yield from self._scalars(others, mine, [*left[:k], *left[k + 1 :]], theirs, bound)
        if known is None and not left:
            ratio = mine / theirs if first.below else theirs / mine
            bound = replace(found, scalars={**found.scalars, name: self.graph.terms.number(ratio)})
            yield from self._scalars(others, mine, left, mine, bound)

    # -- programs -------------------------------------------------------------------------------------------

    def _program(self, top: Term, g: Term, found: Found, depth: int) -> Iterator[Found]:
        """Any pointwise function of what the pattern gives it: looked for behind pointwise operators."""
        name = program_name(top)
        if g.op != "leaf":
            self._fail(depth, top, g, "no tensor of the graph")
            return
        queue, seen = [g], {g}
        while queue:
            candidate = queue.pop(0)
            for inner in self.unify(top.args[0], candidate, found, depth + 1) if candidate.op == "leaf" else ():
                known = inner.programs.get(name)
                if known is None or (known[0].attr[0], known[1].attr[0]) == (candidate.attr[0], g.attr[0]):
                    yield replace(inner, programs={**inner.programs, name: known or (candidate, g)})
            opened = self.graph.open(candidate)
            if opened is candidate or opened.op in ("reduce", "index", "number"):
                continue
            fresh = [a for a in opened.args if a not in seen and a.op != "number"]
            seen.update(fresh)
            queue.extend(fresh)
            if len(seen) > 64:
                return


@dataclass(frozen=True)
class _Factor:
    term: Term
    below: bool  # whether it is divided by


@dataclass(frozen=True)
class _Factors:
    items: tuple[_Factor, ...]
    number: Number

    @staticmethod
    def of(opener: Opener, term: Term, parameters: Mapping[Node, Parameter], is_scalar: Any) -> _Factors:
        """All factors of a pattern's product, scalars taken out of its contractions."""
        items: list[_Factor] = []
        number: Number = 1

        def walk(t: Term, below: bool) -> None:
            nonlocal number
            if t.op == "number":
                number = number / t.attr if below else number * t.attr
                return
            if (t.op == "leaf" and t.attr[0] in parameters) or opener.softmax(t) is not None:
                items.append(_Factor(t, below))
                return
            top = opener.open(t)
            if top.op == "mul":
                for a in top.args:
                    walk(a, below)
            elif top.op == "div":
                walk(top.args[0], below)
                walk(top.args[1], not below)
            elif not below and (peeled := _peel(opener, top, is_scalar)):
                outer, inner = peeled
                for factor in outer:
                    walk(factor.term, factor.below)
                items.append(_Factor(inner, below))
            else:
                items.append(_Factor(t, below))

        walk(term, False)
        return _Factors(tuple(items), number)


def _peel(opener: Opener, top: Term, is_scalar: Any) -> tuple[list[_Factor], Term] | None:
    """Numbers and scalars on the operands of a contraction, and the contraction without them."""
    if top.op != "reduce" or top.attr[0] != "sum":
        return None
    product = opener.open(top.args[0])
    if product.op != "mul":
        return None
    outer: list[_Factor] = []
    sides = []
    for side in product.args:
        inner, below = side, True
        while below:
            opened, below = opener.open(inner), False
            if opened.op in ("mul", "div"):
                pairs = [opened.args] if opened.op == "div" else [opened.args, opened.args[::-1]]
                for x, y in pairs:
                    if y.op == "number" or is_scalar(y):
                        outer.append(_Factor(y, opened.op == "div"))
                        inner, below = x, True
                        break
        sides.append(inner)
    if not outer:
        return None
    terms = opener.terms
    return outer, terms.reduce("sum", terms.call("mul", *sides), top.attr[1])


def _expansions(opener: Opener, g: Term, count: int) -> Iterator[_Factors]:
    """``g`` as a product of up to ``count`` factors and a number, taken apart no further than it has to be."""

    def plain(items: Sequence[_Factor]) -> tuple[list[_Factor], Number]:
        number: Number = 1
        for f in items:
            if f.term.op == "number":
                number = number / f.term.attr if f.below else number * f.term.attr
        return [f for f in items if f.term.op != "number"], number

    def parts(items: list[_Factor], number: Number, start: int) -> Iterator[_Factors]:
        yield _Factors(tuple(items), number)
        if len(items) > count:
            return
        for k in range(start, len(items)):
            term, below = items[k].term, items[k].below
            top = opener.open(term)
            if top.op == "mul":
                inner = [_Factor(a, below) for a in top.args]
            elif top.op == "div":
                inner = [_Factor(top.args[0], below), _Factor(top.args[1], not below)]
            elif not below and (peeled := _peel(opener, top, lambda t: t.op == "leaf" and not t.axes)):
                inner = [*peeled[0], _Factor(peeled[1], below)]
            else:
                continue
            terms, factor = plain(inner)
            yield from parts([*items[:k], *terms, *items[k + 1 :]], number * factor, k)

    yield from parts([_Factor(g, False)], 1, 0)


def _is_truth(opener: Opener, term: Term) -> bool:
    """Whether ``term`` is a truth value, perhaps as a number."""
    if term.op == "leaf":
        value = value_of(term.attr[0])
        if value.dtype == torch.bool:
            return True
    top = opener.open(term)
    return top.op in ("float", "int") and top is not term and _is_truth(opener, top.args[0])


def kind_of(term: Term) -> str:
    """The operator of an opened term, in words."""
    if term.op == "reduce":
        product = term.args[0]
        return "contraction" if term.attr[0] == "sum" and product.op == "mul" else f"{term.attr[0]} over an axis"
    if term.op == "apply":
        target = term.attr[0]
        return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else str(target)
    if term.op == "leaf":
        node = term.attr[0]
        return opname(node) if is_call(node) else "input"
    return {"mul": "product", "add": "sum"}.get(term.op, term.op)


def _same(a: Term, b: Term) -> bool:
    return a is b or (a.op == b.op == "number" and may_equal(a.attr, b.attr)) or (a.op == b.op and a.attr == b.attr)


def may_equal(a: Number, b: Number) -> bool:
    """Whether two numbers are equal but for rounding; where one has symbols, it may be."""
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a == b)
    if any(isinstance(x, sympy.Basic) and x.free_symbols for x in (a, b)):
        return True
    x, y = float(a), float(b)
    return x == y or math.isclose(x, y, rel_tol=1e-5)
