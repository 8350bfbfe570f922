"""Named axes: the coordinates in which every tensor around an attention is written.

An ``Atom`` is an index that runs over ``size`` positions.  A ``Dim`` of a tensor is a row-major product of
atoms, ``()`` for a dimension of size one.  In these coordinates views, permutes, expands and flattened
batches disappear: they only say which atoms stand where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True, eq=False)
class Atom:
    """An index over ``size`` positions.  Two atoms are the same axis only if they are the same object."""

    name: str
    size: Size

    def __repr__(self) -> str:
        return f"{self.name}[{self.size}]"


@dataclass(frozen=True, eq=False)
class Window(Atom):
    """Positions ``offset + base`` of a dimension of ``size`` positions: what a slice asks of its input."""

    base: Atom = field(kw_only=True)
    offset: Size = field(kw_only=True)


Dim: TypeAlias = tuple[Atom, ...]
Dims: TypeAlias = tuple[Dim, ...]


class Irregular(Exception):
    """The dimensions cannot be written in named axes; the message says which.

    ``values`` fill the braces of ``text`` when the message is read: printing symbolic sizes is slow.
    """

    def __init__(self, text: str, *values: object) -> None:
        super().__init__(text, *values)
        self.text, self.values = text, values

    def __str__(self) -> str:
        return self.text.format(*self.values) if self.values else self.text


class Refine(Exception):
    """``atom`` must become the product of two atoms of sizes ``outer`` and ``inner`` everywhere."""

    def __init__(self, atom: Atom, outer: Size, inner: Size) -> None:
        super().__init__(atom, outer, inner)
        self.atom, self.outer, self.inner = atom, outer, inner


def size_of(value: Any) -> Size:
    """The size behind an ``int`` or a ``SymInt``, as an ``int`` where it is one."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Integer):
        return int(value)
    return value


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """The shape of a tensor as sizes."""
    return tuple(size_of(n) for n in value.shape)


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` when that is a whole number for all values of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if a == b:
        return 1
    return _symbolic_quotient(a, b)


@lru_cache(maxsize=4096)
def _symbolic_quotient(a: Size, b: Size) -> Size | None:
    q = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if q.is_Integer:
        return int(q)
    _, denominator = q.as_numer_denom()
    return q if denominator == 1 else None


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of their symbols."""
    if a is b or a == b:
        return True
    return _same_symbolic(a, b) if isinstance(a, sympy.Basic) or isinstance(b, sympy.Basic) else False


@lru_cache(maxsize=4096)
def _same_symbolic(a: Size, b: Size) -> bool:
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def product(atoms: Iterable[Atom]) -> Size:
    """The number of positions of some axes together."""
    total: Size = 1
    for atom in atoms:
        total = total * atom.size
    return total


def atoms_of(dims: Dims) -> Dim:
    """The axes of all dimensions, in order."""
    return tuple(atom for dim in dims for atom in dim)


def regroup(atoms: Sequence[Atom], sizes: Sequence[Size]) -> Dims:
    """Group ``atoms``, in order, into dimensions of the given ``sizes`` (what a view does).

    Raises ``Refine`` when an atom straddles two dimensions, ``Irregular`` when no grouping exists.
    """
    rest, dims = list(atoms), []
    for size in sizes:
        dim: list[Atom] = []
        missing = size
        while not same_size(missing, 1):
            if not rest:
                raise Irregular("a dimension of {} has no axes left", size)
            left = quotient(missing, rest[0].size)
            if left is not None:
                dim.append(rest.pop(0))
                missing = left
                continue
            inner = quotient(rest[0].size, missing)
            if inner is None or isinstance(rest[0], Window):
                raise Irregular("a dimension of {} does not fall on the boundaries of {}", size, rest)
            raise Refine(rest[0], missing, inner)
        dims.append(tuple(dim))
    if rest:
        raise Irregular("axes {} are left over", rest)
    return tuple(dims)
