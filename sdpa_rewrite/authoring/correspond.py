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
from sdpa_rewrite.authoring.unify import Found, Number

Label: TypeAlias = "tuple[str, int]"


class Unlike(Exception):
    """The axes do not correspond; the message says which."""


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


def correspondence(
    found: Found, roots: Sequence[tuple[Term, Term]], apart: Collection[sympy.Symbol] = ()
) -> Correspondence:
    """How the axes correspond; ``apart``: names that stand for several axes.  Raises ``Unlike``."""
    mine, theirs = _roles(found, roots, 0), _roles(found, roots, 1)
    dims: dict[Atom, list[Atom]] = {a: [] for a in mine}
    for labels, atoms in _groups(theirs).items():
        takers = [a for a, own in mine.items() if own == labels] or _broadcast(mine, labels)
        if not takers:
            raise Unlike(f"nothing in the pattern has the roles of the axis {atoms[0]}")
        for k, atom in enumerate(atoms):
            first = len(atoms) - len(takers)  # more axes than the pattern has: the first of it takes the surplus
            dims[takers[max(0, k - max(0, first))]].append(atom)
    _check_indices(found, dims)
    fixed: dict[Atom, Dim] = {a: tuple(d) for a, d in dims.items()}
    sizes = _sizes(fixed)
    free = {a for root, _ in roots for a in _atoms(root)}
    merged = _merge(fixed, free, apart)
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
        places.append((("sum", k), sorted(bound[side], key=lambda a: a.name)))
    for k, index in enumerate(found.indices):
        places.append((("index", k), index[side]))
    roles: dict[Atom, set[Label]] = {}
    for label, atoms in places:
        for atom in atoms:
            roles.setdefault(atom, set()).add(label)
    return {a: frozenset(labels) for a, labels in roles.items()}


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


def _sizes(dims: Mapping[Atom, Dim]) -> dict[sympy.Symbol, Size]:
    """The sizes of the named axes, each the same wherever the name stands.  Raises ``Unlike``."""
    sizes: dict[sympy.Symbol, Size] = {}
    for atom, dim in dims.items():
        size = product(dim)
        if isinstance(atom.size, sympy.Symbol):
            known = sizes.setdefault(atom.size, size)
            if not same_size(known, size):
                raise Unlike(f"an axis of size {size} where another of its name has {known}")
        elif isinstance(atom.size, int) and not same_size(atom.size, size):
            raise Unlike(f"an axis of size {size}, where the pattern has {atom.size}")
    return sizes
