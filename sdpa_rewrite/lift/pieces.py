"""Slices, concatenations and what scatters into them, as terms."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Size, Window, same_size, shape_of
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.lift.ops import NUMBERS, argument, is_call, opname, value_of

if TYPE_CHECKING:
    from sdpa_rewrite.lift.lifter import Lifter


def lift(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """The term of a slice or a concatenation; None where it cannot be read."""
    name = opname(node)
    if name == "slice":
        return _slice(lifter, node, dims)
    if name == "cat":
        return _cat(lifter, node, dims)
    if name == "slice_scatter":
        return _slice_scatter(lifter, node, dims)
    return None


def bounds(node: Node, first: int, size: Size) -> tuple[Size, Size]:
    """Start and stop of a slice, counted from the front."""
    start, end = (value_of(argument(node, first + k, name)) for k, name in enumerate(("start", "end")))

    def clean(value: Any, default: Size) -> Size:
        if value is None:
            return default
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, int) and value >= sys.maxsize:
            return size
        if isinstance(value, int) and value < 0:
            return size + value
        if isinstance(value, int) and isinstance(size, int):
            return min(value, size)
        return value

    return clean(start, 0), clean(end, size)


def _slice(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    source: Any = node.args[0]
    shape = shape_of(value_of(source))
    k = int(argument(node, 1, "dim", 0)) % len(shape)
    out = shape_of(value_of(node))[k]
    if same_size(out, shape[k]):
        return lifter.request(source, dims)
    if argument(node, 4, "step", 1) != 1:
        return None
    start, _ = bounds(node, 2, shape[k])
    return _from(lifter, node, source, dims, k, start)


def part(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """split(x, sizes)[n] is a slice of x."""
    split: Any = node.args[0]
    source: Any = split.args[0]
    shape = shape_of(value_of(source))
    k = int(argument(split, 2, "dim", 0)) % len(shape)
    start: Size = 0
    for piece in value_of(split)[: node.args[1]]:
        start = start + shape_of(piece)[k]
    if same_size(shape_of(value_of(node))[k], shape[k]):
        return lifter.request(source, dims)
    return _from(lifter, node, source, dims, k, start)


def _from(lifter: Lifter, node: Node, source: Node, dims: Dims, k: int, start: Size) -> Term | None:
    """The positions of ``source`` from ``start`` on, as many as ``dims`` has."""
    if not dims[k]:
        return _position(lifter, node, source, dims, k, start) if source in lifter.interior else None
    return lifter.request(
        source, replaced(dims, k, window(lifter, dims[k], start, shape_of(value_of(source))[k], (node, k)))
    )


def _position(lifter: Lifter, node: Node, source: Node, dims: Dims, k: int, at: Size) -> Term:
    """One position of a dimension: a whole piece of a concatenation, or the part of a value that stands there."""
    whole = lifter.bind((node, "whole"), shape_of(value_of(source))[k], dims, "w")
    if len(whole) != 1:
        raise Irregular("one position of a dimension made of several axes")
    term = lifter.request(source, replaced(dims, k, whole))
    if term.op == "cat" and term.attr[0] is whole[0]:
        start: Size = 0
        for piece, arg in zip(term.attr[1], term.args, strict=True):
            if piece is None and same_size(start, at):
                return arg
            start = start + (piece.size if piece is not None else 1)
    return lifter.terms.part(term, whole[0], None, at)


def replaced(dims: Dims, k: int, dim: Dim) -> Dims:
    """``dims`` with dimension ``k`` replaced."""
    return (*dims[:k], dim, *dims[k + 1 :])


def window(lifter: Lifter, dim: Dim, offset: Size, size: Size, key: Any) -> Dim:
    """The dimension of ``size`` positions of which ``dim`` reads those from ``offset`` on."""
    if len(dim) != 1:
        raise Irregular("a slice of a dimension made of several axes")
    atom = dim[0]
    if isinstance(atom, Window):
        offset, base = offset + atom.offset, atom.base
    else:
        base = atom
    made = lifter.axes.atom((key, base, str(offset)), size, base.name + "w")
    return (Window(made.name, size, base=base, offset=offset),)


def _cat(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    parts: Any = node.args[0]
    k = int(argument(node, 1, "dim", 0)) % len(dims)
    return join(lifter, node, dims, k, [(part, shape_of(value_of(part))[k], None) for part in parts])


def join(lifter: Lifter, node: Node, dims: Dims, k: int, parts: list[Any]) -> Term | None:
    """A concatenation along dimension ``k`` of (node, size, offset to read it at or None)."""
    dim = dims[k]
    if len(dim) != 1:
        raise Irregular("a concatenation along several axes")
    atom = dim[0]
    if isinstance(atom, Window):
        return _within(lifter, dims, k, atom, parts)
    pieces: list[Atom | None] = []
    terms: list[Term] = []
    for n, (part, size, offset) in enumerate(parts):
        mine = lifter.bind((node, k, n), size, dims, "p")
        if len(mine) > 1:
            raise Irregular("a concatenated piece of several axes")
        if is_call(part) and opname(part) in NUMBERS:
            pieces.append(mine[0] if mine else None)
            terms.append(lifter.request(part, replaced(dims, k, mine)))
            continue
        read = mine if offset is None else window(lifter, mine, offset, shape_of(value_of(part))[k], (node, n))
        pieces.append(mine[0] if mine else None)
        terms.append(lifter.request(part, replaced(dims, k, read)))
    return lifter.terms.cat(atom, tuple(pieces), tuple(terms))


def _within(lifter: Lifter, dims: Dims, k: int, atom: Window, parts: list[Any]) -> Term | None:
    """A slice of a concatenation that falls into one piece reads that piece."""
    from sdpa_rewrite.lift.lifter import CannotWindow

    start: Size = 0
    for part, size, offset in parts:
        if same_size(start, atom.offset):
            if same_size(atom.base.size, size):
                read: Dim = (atom.base,)
                if offset is not None:
                    read = window(lifter, read, offset, shape_of(value_of(part))[k], (part, k))
                return lifter.request(part, replaced(dims, k, read))
            break
        start = start + size
    raise CannotWindow("a slice across the pieces of a concatenation")


def _slice_scatter(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """slice_scatter(base, source): base up to the slice, source, base after it."""
    base, source = node.args[:2]
    shape = shape_of(value_of(base))
    k = int(argument(node, 2, "dim", 0)) % len(shape)
    if argument(node, 5, "step", 1) != 1:
        return None
    start, stop = bounds(node, 3, shape[k])
    parts: list[Any] = []
    if not same_size(start, 0):
        parts.append((base, start, 0))
    parts.append((source, shape_of(value_of(source))[k], None))
    if not same_size(stop, shape[k]):
        parts.append((base, shape[k] - stop, stop))
    if len(parts) == 1:
        return lifter.request(source, dims)  # type: ignore[arg-type]
    return join(lifter, node, dims, k, parts)


def identity_gather(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """x[arange(n)[:, None], arange(m)] is x: each index counts along an axis of its own."""
    source, indices = node.args[:2]
    below: list[Dim] = []
    for index, size in zip(indices, shape_of(value_of(source)), strict=False):  # type: ignore[arg-type]
        if index is None:
            return None
        term = lifter.broadcast(index, dims)
        if term.op == "number" and term.attr == 0 and same_size(size, 1):
            below.append(())
        elif term.op == "index" and term.attr[1:] == (0, 1) and same_size(_extent(term.attr[0]), size):
            below.append(term.attr[0])
        else:
            return None
    if len(below) != len(shape_of(value_of(source))):
        return None
    return lifter.request(source, tuple(below))  # type: ignore[arg-type]


def _extent(dim: Dim) -> Size:
    total: Size = 1
    for atom in dim:
        total = total * atom.size
    return total
