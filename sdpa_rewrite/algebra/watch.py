"""Which outcomes the conditions of a proof have had: random data proves nothing about a side that it never took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.algebra.tiny import COMPARISONS, TinyWorld

CONDITIONS = COMPARISONS | {"maximum", "minimum"}


@dataclass
class Watch:
    """``open``: the conditions in ``terms`` that were not seen on both sides yet, each with those it was seen on."""

    terms: Sequence[Term]
    open: dict[Term, set[bool]] = field(init=False)

    def __post_init__(self) -> None:
        self.open = {t: set() for t in conditions(self.terms)}

    def note(self, world: TinyWorld) -> None:
        """Note the outcomes in a world."""
        for term in list(self.open):
            sides = self.open[term]
            sides.update(_sides(term, world))
            if len(sides) == 2:
                del self.open[term]


def conditions(terms: Iterable[Term]) -> list[Term]:
    """The conditions among ``terms`` and below them, in the order in which they were made."""
    found = {t for term in terms for t in subterms(term) if t.op in CONDITIONS}
    return sorted(found, key=lambda t: t.order)


def magnitudes(found: Iterable[Term]) -> list[float]:
    """Magnitudes of the numbers in conditions."""
    numbers = (n.attr for t in found for n in t.args if n.op == "number" and isinstance(n.attr, (int, float)))
    return sorted({abs(float(n)) for n in numbers if 0 < abs(n) < 1e30})


def _sides(term: Term, world: TinyWorld) -> set[bool]:
    value = world.values.get(term)
    if value is None:
        return set()
    if value.dtype == torch.bool:
        return {bool(v) for v in (value.any(), value.all())}
    a, b = (world.values[x] for x in term.args)
    less = a < b
    return {bool(v) for v in (less.any(), not (a > b).any())}
