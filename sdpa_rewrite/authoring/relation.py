"""Values that are made of positions only (a causal mask, a distance): compared position by position.

Random positions would not tell a window of 128 from one of 129, so these are compared on the whole grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Size
from sdpa_rewrite.algebra.interpret import World, evaluate
from sdpa_rewrite.algebra.term import Term, subterms

if TYPE_CHECKING:
    from sdpa_rewrite.authoring.correspond import Correspondence

LARGEST = 1 << 22  # positions of a grid
USUAL = 96  # what an unknown size is taken for, if no number of the relation is larger


def of_positions(term: Term) -> bool:
    """Whether ``term`` reads positions and numbers, and no tensor."""
    found = list(subterms(term))
    return any(t.op == "index" for t in found) and not any(t.op in ("leaf", "hole", "reduce") for t in found)


class Grid(World):
    """All positions of some axes."""

    def __init__(self, sizes: Mapping[Atom, int], symbols: Mapping[sympy.Symbol, int]) -> None:
        super().__init__(sorted(sizes, key=lambda a: (a.name, id(a))))
        self._sizes, self._symbols = sizes, symbols

    def size(self, atom: Atom) -> int:
        """See ``World``."""
        return self._sizes[atom]

    def leaf(self, term: Term) -> Tensor:
        """There are none."""
        raise KeyError(f"{term} is a tensor")

    def index(self, term: Term) -> Tensor:
        """See ``World``."""
        dim, start, step = term.attr
        flat = torch.arange(self.extent(dim), dtype=torch.float64)
        return flat * self._concrete(step) + self._concrete(start)

    def number(self, value: Any) -> Tensor:
        """See ``World``."""
        if isinstance(value, bool):
            return torch.tensor(value)
        return torch.tensor(self._concrete(value), dtype=torch.float64)

    def _concrete(self, value: Any) -> float:
        return float(value.xreplace(self._symbols)) if isinstance(value, sympy.Basic) else float(value)


def same_everywhere(mine: Term, theirs: Term, negated: bool, axes: Correspondence) -> bool:
    """Whether a pattern's value and a graph's are equal at all positions (opposite, if ``negated``)."""
    pairs = [(a, axes.dims[a]) for a in sorted(mine.axes, key=lambda a: a.name) if a in axes.dims]
    if len(pairs) < len(mine.axes):
        return False
    sizes = {b: _size(b.size, mine, theirs) for _, dim in pairs for b in dim}
    sizes |= {b: _size(b.size, mine, theirs) for b in theirs.axes if b not in sizes}
    total = 1
    for n in sizes.values():
        total *= n
    if total > LARGEST:
        return False
    symbols: dict[Any, int] = {}
    for s in _symbols(theirs) | {s for a in sizes if isinstance(a.size, sympy.Basic) for s in a.size.free_symbols}:
        symbols[s] = _size(s, mine, theirs)
    there = Grid(sizes, symbols)
    extents = {a: there.extent(d) for a, d in pairs}
    here = Grid(extents, {**symbols, **{s: _plain(n, symbols) for s, n in axes.sizes.items()}})
    a = here.gather(evaluate(mine, here), tuple((x,) for x, _ in pairs))
    b = there.gather(evaluate(theirs, there), tuple(d for _, d in pairs)) if theirs.axes <= set(sizes) else None
    if b is None or {x for _, d in pairs for x in d} < theirs.axes:
        return False
    return bool((a.logical_not() == b).all() if negated else torch.equal(a.to(torch.float64), b.to(torch.float64)))


def _plain(size: Size, symbols: Mapping[Any, int]) -> int:
    return int(size.xreplace(symbols)) if isinstance(size, sympy.Basic) else size


def _size(size: Size, *terms: Term) -> int:
    """A size; one that is unknown is taken for more than any number of the terms."""
    if isinstance(size, int):
        return size
    numbers = [abs(t.attr) for term in terms for t in subterms(term) if t.op == "number" and _is_number(t.attr)]
    starts = [abs(n) for term in terms for t in subterms(term) if t.op == "index" for n in t.attr[1:] if _is_number(n)]
    largest = max((n for n in (*numbers, *starts) if n < 1 << 12), default=0)
    return max(USUAL, int(2 * largest) + 5)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _symbols(term: Term) -> set[sympy.Symbol]:
    values = [t.attr for t in subterms(term) if t.op == "number"]
    values += [n for t in subterms(term) if t.op == "index" for n in t.attr[1:]]
    return {s for v in values if isinstance(v, sympy.Basic) for s in v.free_symbols}
