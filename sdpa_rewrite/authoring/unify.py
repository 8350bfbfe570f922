"""A pattern against a graph: which tensor of the graph each parameter of the pattern is.

Both are opened from the result down, operator by operator.  Sums and products are unordered, numbers in them are
folded, and a factor may sit on any side of a contraction.  Axes are not compared here: ``correspond`` finds the
correspondence of axes that the bindings imply, and the proof has the last word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node

from sdpa_rewrite.algebra.term import COMMUTATIVE, Term
from sdpa_rewrite.authoring.factors import Factor, Factors, expansions, factors_of, peel
from sdpa_rewrite.authoring.found import Equal, Found, Number, Obstacle, Place, Related, Summed, may_equal, same_value
from sdpa_rewrite.authoring.hole import is_program, program_name
from sdpa_rewrite.authoring.opener import Opener
from sdpa_rewrite.authoring.parameters import Parameter
from sdpa_rewrite.lift.ops import is_call, opname, value_of

EFFORT = 4000  # comparisons that one attempt may cost


@dataclass
class Unifier:
    """One attempt: the pattern's opener and parameters, the graph's opener; ``obstacle``: where it came furthest."""

    pattern: Opener
    parameters: Mapping[Node, Parameter]
    roots: tuple[Term, ...]
    graph: Opener
    obstacle: Obstacle | None = None
    effort: int = 0

    def unify(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        """Every way in which ``g`` is what the pattern has at ``p``, as far as operators tell."""
        self.effort += 1
        if self.effort > EFFORT:
            self._fail(found, p, g, "given up: there are too many ways to try")
            return iter(())
        rule: Rule = self.pattern.once("rule", p, self._rule, Unifier._operator)
        return rule(self, p, g, found)

    def _rule(self, p: Term) -> Rule:
        """What compares ``p`` with a term of the graph."""
        parameter = self._parameter(p)
        if parameter is not None:
            return Unifier._scalar if parameter.kind == "scalar" else Unifier._tensor
        if p.op == "number":
            return Unifier._number
        if self.pattern.of_positions(p):
            return Unifier._relation
        if self.pattern.softmax(p) is not None:
            return Unifier._softmax
        top = self.pattern.open(p)
        if is_program(top):
            return Unifier._program
        if self._scaled_contraction(top):
            return Unifier._product
        return RULES.get(top.op, Unifier._operator)

    def passing_over(self, obstacle: Obstacle) -> int:
        """How much is found when the operator that is in the way is passed over: in what it reads."""
        ps, gs = (
            (soft.logits,) if soft is not None else opener.open(term).args
            for opener, term in ((self.pattern, obstacle.place.expected), (self.graph, obstacle.place.got))
            for soft in (opener.softmax(term),)
        )
        if not obstacle.unread:
            return 0
        total = 0
        for p, g in zip(ps, gs, strict=True) if len(ps) == len(gs) else ():
            below = replace(self, obstacle=None, effort=0)
            ends = next(below.unify(p, g, Found()), None)
            total += ends.size if ends is not None else below.obstacle.matched if below.obstacle is not None else 0
        return total

    def _parameter(self, p: Term) -> Parameter | None:
        return self.parameters.get(p.attr[0]) if p.op == "leaf" else None

    def _is_parameter(self, p: Term) -> bool:
        return self._parameter(p) is not None

    def _fail(self, found: Found, p: Term, g: Term, text: str, unread: bool = False) -> None:
        if self.obstacle is None or found.size > self.obstacle.matched:
            self.obstacle = Obstacle(found.size, self._place(p, g), text, unread)

    def _place(self, p: Term, g: Term) -> Place:
        return Place(p, g, self.pattern.nodes_of(p), self.graph.nodes_of(g))

    def _equal(self, mine: Number, theirs: Number, found: Found, p: Term, g: Term) -> Found:
        return found._replace(numbers=(*found.numbers, Equal(mine, theirs, self._place(p, g))))

    # -- leaves ---------------------------------------------------------------------------------------------

    def _scalar(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        name = self.parameters[p.attr[0]].name
        known = found.scalars.get(name)
        if g.op != "number" and (g.op != "leaf" or g.axes):
            self._fail(found, p, g, f"{name} is declared a scalar, and this is none")
        elif known is None or same_value(known, g):
            yield found._replace(scalars={**found.scalars, name: g})
        else:
            self._fail(found, p, g, f"{name} is another number elsewhere")

    def _tensor(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        parameter = self.parameters[p.attr[0]]
        if g.op != "leaf":
            self._fail(found, p, g, "no tensor of the graph")
            return
        dtype = value_of(g.attr[0]).dtype
        if not (dtype.is_floating_point if parameter.dtype is None else dtype == parameter.dtype):
            self._fail(found, p, g, f"of type {dtype}, not {parameter.dtype or 'a floating type'}")
            return
        known = next((there for here, there in found.leaves if here.attr[0] is p.attr[0]), None)
        if known is not None and known.attr[0] is not g.attr[0]:
            self._fail(found, p, g, f"{parameter.name} is {known.attr[0].name} elsewhere")
            return
        yield found._replace(leaves=(*found.leaves, (p, g)))

    def _number(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        number = g if g.op == "number" else self.graph.open(g)
        if number.op == "number" and may_equal(p.attr, number.attr):
            yield self._equal(p.attr, number.attr, found, p, g)
        else:
            self._fail(found, p, g, f"not the number {p.attr}")

    # -- operators ------------------------------------------------------------------------------------------

    def _softmax(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        soft, theirs = self.pattern.softmax(p), self.graph.softmax(g)
        assert soft is not None
        if theirs is None or theirs.safe != soft.safe:
            text = "no softmax" if theirs is None else "softmax and safe softmax differ"
            self._fail(found, p, g, text, unread=True)
            return
        bound = (*found.bound, Summed(soft.axes, theirs.axes, self._place(p, g)))
        yield from self.unify(soft.logits, theirs.logits, found.another(bound=bound))

    def _operator(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        top, other = self.pattern.open(p), self.graph.open(g)
        if other.op != top.op or len(other.args) != len(top.args) or not self._same_kind(top, other):
            self._fail(found, p, g, f"no {kind_of(top)}", unread=True)
            return
        bound = found.bound
        if top.op == "reduce":
            bound = (*bound, Summed(frozenset(top.attr[1]), frozenset(other.attr[1]), self._place(p, g)))
        found = found.another(bound=bound)
        if top.op == "index":
            yield found._replace(indices=(*found.indices, (top.attr[0], other.attr[0])))
            return
        orders = itertools.permutations(other.args) if top.op in COMMUTATIVE else iter((other.args,))
        for args in orders:
            yield from self._each(top.args, args, found)

    def _same_kind(self, p: Term, g: Term) -> bool:
        if p.op == "leaf":
            return False  # an operator that cannot be read
        if p.op == "reduce":
            return bool(p.attr[0] == g.attr[0])
        if p.op == "index":
            return bool(p.attr[1:] == g.attr[1:])
        return p.op not in ("apply", "hole", "cat", "part", "along") or bool(p.attr == g.attr)

    def _each(self, ps: Sequence[Term], gs: Sequence[Term], found: Found) -> Iterator[Found]:
        if not ps:
            yield found
            return
        for first in self.unify(ps[0], gs[0], found):
            yield from self._each(ps[1:], gs[1:], first)

    # -- conditions -----------------------------------------------------------------------------------------

    def _relation(self, p: Term, g: Term, found: Found, negated: bool = False) -> Iterator[Found]:
        """A value that is made of positions only: which, is compared when the axes are known."""
        if self.graph.of_positions(g):
            relation = Related(self.pattern.whole(p), self.graph.whole(g), negated, self._place(p, g))
            yield found.another(relations=(*found.relations, relation))
        else:
            self._fail(found, p, g, "not made of positions only")

    def _where(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        """where(c, a, b) is where(not c, b, a)."""
        top, other = self.pattern.open(p), self.graph.open(g)
        if other.op != "where":
            self._fail(found, p, g, "no where")
            return
        condition, yes, no = other.args
        for negated, branches in ((False, (yes, no)), (True, (no, yes))):
            for first in self._condition(top.args[0], condition, negated, found.another()):
                yield from self._each(top.args[1:], branches, first)

    def _truth(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        yield from self._condition(p, g, False, found)

    def _condition(self, p: Term, g: Term, negated: bool, found: Found) -> Iterator[Found]:
        """A condition, or its opposite if ``negated``."""
        if self.pattern.of_positions(p):
            yield from self._relation(p, g, found, negated)
            return
        mine, one = self._plain(self.pattern, p)
        theirs, other = self._plain(self.graph, g)
        if (one != other) != negated:
            self._fail(found, p, g, "the opposite condition")
        elif mine is p and self.pattern.open(p).op in ("not", "ne"):
            yield from self._operator(p, theirs, found)
        else:
            yield from self.unify(mine, theirs, found)

    def _plain(self, opener: Opener, term: Term) -> tuple[Term, bool]:
        """A condition without its negations, and whether their number is odd.  x == 0 is a negation of x."""
        odd = False
        while not self._is_parameter(term):
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

    def _sum(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        wanted, constant = self._addends(self.pattern, p)
        ways = list(self._sums(g, len(wanted)))
        sums = [(given, theirs) for given, theirs in ways if len(given) == len(wanted)]
        for given, theirs in sums:
            if may_equal(constant, theirs):
                yield from self._assign(wanted, given, self._equal(constant, theirs, found, p, g).another())
            else:
                self._fail(found, p, g, f"{theirs} is added, not {constant}")
        numbered = list(self._numbered(wanted, constant, ways, found))
        for rest, given, bound in numbered:
            yield from self._assign(rest, given, bound)
        if not sums and not numbered:
            self._fail(found, p, g, "no sum of this many parts")

    def _numbered(
        self, wanted: list[Term], constant: Number, ways: list[tuple[list[Term], Number]], found: Found
    ) -> Iterator[tuple[list[Term], list[Term], Found]]:
        """Ways in which a number that the graph adds is what a scalar of the pattern stands for; 0 where none is added.

        The addends that are left of the pattern and of the graph, and what is found.
        """
        if isinstance(constant, sympy.Basic):  # of the pattern's sizes, which are not known yet
            return
        for k, addend in enumerate(wanted):
            factors = self._factors(addend)
            scalars = [f.term for f in factors.items if self._is_scalar(f.term) and not f.below]
            if len(scalars) != 1 or len(factors.items) != 1 or may_equal(factors.number, 0):
                continue
            name = self.parameters[scalars[0].attr[0]].name
            rest, known = [*wanted[:k], *wanted[k + 1 :]], found.scalars.get(name)
            for given, theirs in sorted(ways, key=lambda way: may_equal(way[1], constant)):
                value = self.graph.terms.number((theirs - constant) / factors.number)
                if len(given) == len(rest) and (known is None or same_value(known, value)):
                    yield rest, given, found.another(scalars={**found.scalars, name: value})

    def _addends(self, opener: Opener, term: Term) -> tuple[list[Term], Number]:
        """All addends, and the numbers among them added up."""
        if term.op == "number":
            return [], term.attr
        if not self._is_parameter(term):
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

    def _assign(self, ps: list[Term], gs: list[Term], found: Found) -> Iterator[Found]:
        """Pair off the parts of two sums; parameters last, since they fit anything."""
        ps = sorted(ps, key=self._is_parameter)
        if not ps:
            if not gs:
                yield found
            return
        for k, g in enumerate(gs):
            for first in self.unify(ps[0], g, found):
                yield from self._assign(ps[1:], [*gs[:k], *gs[k + 1 :]], first)

    # -- products -------------------------------------------------------------------------------------------

    def _scaled_contraction(self, top: Term) -> bool:
        return top.op == "reduce" and top.attr[0] == "sum" and bool(peel(self.pattern, top, self._is_scalar))

    def _is_scalar(self, term: Term) -> bool:
        parameter = self._parameter(term)
        return parameter is not None and parameter.kind == "scalar"

    def _product(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        factors = self._factors(p)
        scalars = [f for f in factors.items if self._is_scalar(f.term)]
        rest = sorted((f for f in factors.items if f not in scalars), key=lambda f: self._is_parameter(f.term))

        def unlikely(way: Factors) -> bool:
            """A number that is there is the scalar's, if there are scalars, and else the pattern's own."""
            if scalars:
                return not way.items or may_equal(way.number, 1)
            return not may_equal(way.number, factors.number)

        ways = sorted(self._expansions(g, len(rest) + len(scalars)), key=unlikely)
        paired = False
        for given in ways:
            hopeless = not scalars and unlikely(given)
            for left, fresh in self._pair_factors(rest, list(given.items), found.another()):
                paired, fits = True, False
                for made in self._scalars(scalars, factors.number, left, given.number, fresh):
                    fits = True
                    yield self._equal(*made, p, g)
                if not fits:
                    other = "other factors" if left else f"the number {given.number}, not {factors.number}"
                    self._fail(fresh, p, g, f"times {other}")
                if hopeless:  # however the others are paired
                    break
        if not paired:
            self._fail(found, p, g, "no product of these factors")

    def _factors(self, p: Term) -> Factors:
        """The pattern's product, taken apart."""
        known: Factors | None = self.pattern.once("factors", p, self._factors_of, None)
        return known or self._factors_of(p)

    def _factors_of(self, p: Term) -> Factors:
        return factors_of(self.pattern, p, self._is_parameter, self._is_scalar)

    def _expansions(self, g: Term, count: int) -> Sequence[Factors]:
        """The graph's product, taken apart in every way."""

        def taken_apart(term: Term) -> Sequence[Factors]:
            return tuple(expansions(self.graph, term, count))

        known: Sequence[Factors] = self.graph.once(("expansions", count), g, taken_apart, ())
        return known or taken_apart(g)

    def _pair_factors(self, ps: list[Factor], gs: list[Factor], found: Found) -> Iterator[tuple[list[Factor], Found]]:
        if not ps:
            yield gs, found
            return
        for k, g in enumerate(gs):
            if g.below != ps[0].below:
                continue
            for first in self.unify(ps[0].term, g.term, found):
                yield from self._pair_factors(ps[1:], [*gs[:k], *gs[k + 1 :]], first)

    def _scalars(
        self, scalars: list[Factor], mine: Number, left: list[Factor], theirs: Number, found: Found
    ) -> Iterator[tuple[Number, Number, Found]]:
        """What is left over in the graph's product is what the pattern's scalars stand for; 1 where nothing is.

        The two numbers that have to be equal then, and what is found.
        """
        if not scalars:
            if not left and may_equal(mine, theirs):
                yield mine, theirs, found
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
                bound = found._replace(scalars={**found.scalars, name: g.term})
                yield from self._scalars(others, mine, [*left[:k], *left[k + 1 :]], theirs, bound)
        if known is None and not left:
            ratio = mine / theirs if first.below else theirs / mine
            bound = found._replace(scalars={**found.scalars, name: self.graph.terms.number(ratio)})
            yield from self._scalars(others, mine, left, mine, bound)

    # -- programs -------------------------------------------------------------------------------------------

    def _program(self, p: Term, g: Term, found: Found) -> Iterator[Found]:
        """Any pointwise function of what the pattern gives it: looked for behind pointwise operators."""
        top = self.pattern.open(p)
        name = program_name(top)
        if g.op != "leaf":
            self._fail(found, top, g, "no tensor of the graph")
            return
        queue, seen = [g], {g}
        while queue:
            candidate = queue.pop(0)
            for inner in self.unify(top.args[0], candidate, found) if candidate.op == "leaf" else ():
                known = inner.programs.get(name)
                if known is None or (known[0].attr[0], known[1].attr[0]) == (candidate.attr[0], g.attr[0]):
                    yield inner._replace(programs={**inner.programs, name: known or (candidate, g)})
            opened = self.graph.open(candidate)
            if opened is candidate or opened.op in ("reduce", "index", "number"):
                continue
            fresh = [a for a in opened.args if a not in seen and a.op != "number"]
            seen.update(fresh)
            queue.extend(fresh)
            if len(seen) > 64:
                return


Rule: TypeAlias = Callable[[Unifier, Term, Term, Found], Iterator[Found]]
RULES: Mapping[str, Rule] = {
    "mul": Unifier._product,
    "div": Unifier._product,
    "add": Unifier._sum,
    "where": Unifier._where,
    "not": Unifier._truth,
    "ne": Unifier._truth,
}


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
