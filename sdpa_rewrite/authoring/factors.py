"""Products taken apart: factors above and below the line, numbers folded, scalars taken out of contractions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.authoring.found import Number
from sdpa_rewrite.authoring.opener import Opener


@dataclass(frozen=True)
class Factor:
    """A factor of a product, or what the product is divided by."""

    term: Term
    below: bool


@dataclass(frozen=True)
class Factors:
    """A product: its factors, and its numbers as one."""

    items: tuple[Factor, ...]
    number: Number


def factors_of(
    opener: Opener, term: Term, is_one: Callable[[Term], bool], is_scalar: Callable[[Term], bool]
) -> Factors:
    """All factors of a pattern's product, scalars taken out of its contractions; ``is_one``: not to be taken apart."""
    items: list[Factor] = []
    number: Number = 1

    def walk(t: Term, below: bool) -> None:
        nonlocal number
        if t.op == "number":
            number = number / t.attr if below else number * t.attr
            return
        if is_one(t) or opener.softmax(t) is not None:
            items.append(Factor(t, below))
            return
        top = opener.open(t)
        if top.op == "mul":
            for a in top.args:
                walk(a, below)
        elif top.op == "div":
            walk(top.args[0], below)
            walk(top.args[1], not below)
        elif not below and (peeled := peel(opener, top, is_scalar)):
            outer, inner = peeled
            for factor in outer:
                walk(factor.term, factor.below)
            items.append(Factor(inner, below))
        else:
            items.append(Factor(t, below))

    walk(term, False)
    return Factors(tuple(items), number)


def peel(opener: Opener, top: Term, is_scalar: Callable[[Term], bool]) -> tuple[list[Factor], Term] | None:
    """Numbers and scalars on the operands of a contraction, and the contraction without them."""
    if top.op != "reduce" or top.attr[0] != "sum":
        return None
    product = opener.open(top.args[0])
    if product.op != "mul":
        return None
    outer: list[Factor] = []
    sides = []
    for side in product.args:
        inner, below = side, True
        while below:
            opened, below = opener.open(inner), False
            if opened.op in ("mul", "div"):
                pairs = [opened.args] if opened.op == "div" else [opened.args, opened.args[::-1]]
                for x, y in pairs:
                    if y.op == "number" or is_scalar(y):
                        outer.append(Factor(y, opened.op == "div"))
                        inner, below = x, True
                        break
        sides.append(inner)
    if not outer:
        return None
    terms = opener.terms
    contraction = terms.reduce("sum", terms.call("mul", *sides), top.attr[1])
    for node in opener.nodes_of(top):
        opener.note_parts(contraction, node)
    return outer, contraction


def expansions(opener: Opener, g: Term, count: int) -> Iterator[Factors]:
    """``g`` as a product of up to ``count`` factors and a number, taken apart no further than it has to be."""

    def plain(items: Sequence[Factor]) -> tuple[list[Factor], Number]:
        number: Number = 1
        for f in items:
            if f.term.op == "number":
                number = number / f.term.attr if f.below else number * f.term.attr
        return [f for f in items if f.term.op != "number"], number

    def parts(items: list[Factor], number: Number, start: int) -> Iterator[Factors]:
        yield Factors(tuple(items), number)
        if len(items) > count:
            return
        for k in range(start, len(items)):
            term, below = items[k].term, items[k].below
            top = opener.open(term)
            if top.op == "mul":
                inner = [Factor(a, below) for a in top.args]
            elif top.op == "div":
                inner = [Factor(top.args[0], below), Factor(top.args[1], not below)]
            elif not below and (peeled := peel(opener, top, lambda t: t.op == "leaf" and not t.axes)):
                inner = [*peeled[0], Factor(peeled[1], below)]
            else:
                continue
            terms, factor = plain(inner)
            yield from parts([*items[:k], *terms, *items[k + 1 :]], number * factor, k)

    yield from parts([Factor(g, False)], 1, 0)
