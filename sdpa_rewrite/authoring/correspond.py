"""Which axes of the graph each axis of a pattern is, from where they occur.

An axis is known by its roles: the tensors that have it, the sums that it is summed in, the results that keep it.  A
flattened batch and heads are one axis of the graph where the pattern has two, and a batch of one is none: all of
these have the same roles, so they share what is there.  A tensor may lack an axis that the pattern gives it: then it
is broadcast along it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from sdpa_rewrite.algebra.axes import Atom, Dim, Size, atoms_of, product, same_size
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.authoring.found import Found, Number, Place
from sdpa_rewrite.authoring.lifted import LiftedPattern

Label: TypeAlias = "tuple[str, int]"


class Unlike(Exception):
    """What was found does not fit together; the message says how.  ``place``: where, if it is one place."""

    def __init__(self, text: str, place: Place | None = None) -> None:
        super().__init__(text)
        self.place = place


@dataclass(frozen=True)
class Correspondence:
    """``dims``: the graph's axes for each axis of the pattern.  ``sizes``: the graph's size of each named axis.

    ``merged``: axes of the graph that were found apart, from another result, and that are one: what each is called.
    """

    dims: Mapping[Atom, Dim]
    sizes: Mapping[sympy.Symbol, Size]
    merged: Mapping[Atom, Atom]

    def dim(self, dim: Dim) -> Dim:
        """The graph's axes of a dimension of the pattern."""
        return tuple(b for a in dim for b in self.dims[a])

    def number(self, value: Number) -> Number:
        """A number of the pattern, the sizes of its axes put in."""
        if not isinstance(value, sympy.Basic):
            return value
        done = value.xreplace({s: sympy.sympify(n) for s, n in self.sizes.items()})
        return done if done.free_symbols else float(done)


def correspondence(found: Found, tops: Sequence[Term], pattern: LiftedPattern) -> Correspondence:
    """How the axes correspond; ``tops``: the results in the graph.  Raises ``Unlike``."""
    roots = list(zip(pattern.roots, tops, strict=True))
    mine, theirs = _roles(found, roots, 0), _roles(found, roots, 1)
    dims: dict[Atom, list[Atom]] = {a: [] for a in mine}
    for labels, atoms in _groups(theirs).items():
        takers = [a for a, own in mine.items() if own == labels] or _broadcast(mine, labels)
        if not takers:
            raise _unknown(atoms[0], labels, found, pattern)
        for k, atom in enumerate(atoms):
            first = len(atoms) - len(takers)  # more axes than the pattern has: the first of it takes the surplus
            dims[takers[max(0, k - max(0, first))]].append(atom)
    _check_indices(found, dims)
    fixed: dict[Atom, Dim] = {a: tuple(d) for a, d in dims.items()}
    sizes = _sizes(fixed, {symbol: name for name, symbol in pattern.symbols.items()})
    free = {a for root in pattern.roots for a in _atoms(root)}
    merged = _merge(fixed, free, pattern.apart)
    return Correspondence(fixed, sizes, merged)


def _merge(dims: dict[Atom, Dim], free: Collection[Atom], apart: Collection[sympy.Symbol]) -> dict[Atom, Atom]:
    """Let the axes of a result be those of the same name elsewhere, but for names that stand for several axes.

    An axis that is summed away is called what the sum calls it; two sums over one name stay two.
    """
    first: dict[sympy.Symbol, Dim] = {}
    merged: dict[Atom, Atom] = {}
    for atom in sorted(dims, key=lambda a: a in free):
        dim = dims[atom]
        if isinstance(atom.size, sympy.Symbol) and atom.size not in apart:
            known = first.setdefault(atom.size, dim)
            if atom in free and len(known) == len(dim):
                merged.update((b, a) for a, b in zip(known, dim, strict=True) if a is not b)
                dims[atom] = known
    return merged


def _roles(found: Found, roots: Sequence[tuple[Term, Term]], side: int) -> dict[Atom, frozenset[Label]]:
    """Where each axis occurs, in the order of the results' and then the tensors' dimensions."""
    places: list[tuple[Label, Iterable[Atom]]] = []
    for k, root in enumerate(roots):
        places.append((("result", k), _atoms(root[side])))
    for k, leaf in enumerate(found.leaves):
        places.append((("tensor", k), _atoms(leaf[side])))
    for k, bound in enumerate(found.bound):
        axes = bound.theirs if side else bound.mine
        places.append((("sum", k), sorted(axes, key=lambda a: a.name)))
    for k, index in enumerate(found.indices):
        places.append((("index", k), index[side]))
    roles: dict[Atom, set[Label]] = {}
    for label, atoms in places:
        for atom in atoms:
            roles.setdefault(atom, set()).add(label)
    return {a: frozenset(labels) for a, labels in roles.items()}


def _unknown(atom: Atom, labels: Collection[Label], found: Found, pattern: LiftedPattern) -> Unlike:
    """That an axis of the graph is none of the pattern's: in the words that an author knows its roles by."""

    def word(label: Label) -> str:
        kind, k = label
        if kind == "tensor":
            return pattern.parameters[found.leaves[k][0].attr[0]].name
        if kind == "result":
            return "the result" if len(pattern.roots) == 1 else f"result {k}"
        return {"sum": "a softmax or sum over it", "index": "a position along it"}[kind]

    order = {"tensor": 0, "sum": 1, "index": 2, "result": 3}
    words = dict.fromkeys(word(label) for label in sorted(labels, key=lambda label: (order[label[0]], label[1])))
    place = next((found.bound[k].place for kind, k in sorted(labels) if kind == "sum"), None)
    return Unlike(
        f"an axis of size {atom.size} is in {', '.join(words)}; none of the pattern's is in just these", place
    )


def _atoms(leaf: Term) -> Iterable[Atom]:
    return atoms_of(leaf.attr[1])


def _groups(roles: Mapping[Atom, frozenset[Label]]) -> dict[frozenset[Label], list[Atom]]:
    groups: dict[frozenset[Label], list[Atom]] = {}
    for atom, labels in roles.items():
        groups.setdefault(labels, []).append(atom)
    return groups


def _broadcast(mine: Mapping[Atom, frozenset[Label]], labels: frozenset[Label]) -> list[Atom]:
    """Axes with these roles and others, where the others are tensors that may lack the axis."""
    wider = [own for own in mine.values() if own > labels and all(kind == "tensor" for kind, _ in own - labels)]
    if not wider:
        return []
    nearest = min(wider, key=len)
    return [a for a, own in mine.items() if own == nearest]


def _check_indices(found: Found, dims: Mapping[Atom, list[Atom]]) -> None:
    for mine, theirs in found.indices:
        if [b for a in mine for b in dims[a]] != list(theirs):
            raise Unlike("a position is counted along another axis")


def _sizes(dims: Mapping[Atom, Dim], names: Mapping[sympy.Symbol, str]) -> dict[sympy.Symbol, Size]:
    """The sizes of the named axes, each the same wherever the name stands.  Raises ``Unlike``."""
    sizes: dict[sympy.Symbol, Size] = {}
    for atom, dim in dims.items():
        size = product(dim)
        if isinstance(atom.size, sympy.Symbol):
            known = sizes.setdefault(atom.size, size)
            if not same_size(known, size):
                raise Unlike(f"the axis {names.get(atom.size, atom)} has size {known} here and {size} there")
        elif isinstance(atom.size, int) and not same_size(atom.size, size):
            raise Unlike(f"an axis of size {size}, where the pattern has one of {atom.size}")
    return sizes
