"""What a term is worth in a world: sizes for the axes, tensors for the leaves.

Every value is held with one dimension per axis of the world, in the world's order, of size one where it does
not vary.  Broadcasting then does all alignment.  The same evaluator runs on tiny random float64 data (the
proofs), and on the real tensors of a graph (the replacements).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Size, atoms_of
from sdpa_rewrite.algebra.term import Slot, Term

POINTWISE: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "pow": torch.pow,
    "tanh": torch.tanh,
    "where": torch.where,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "float": lambda x: x.to(torch.float64),
    "int": lambda x: x.to(torch.int64),
    "bool": lambda x: x != 0,
}

REDUCTIONS: Mapping[str, Callable[[Tensor, list[int]], Tensor]] = {
    "sum": lambda x, d: x.sum(d, keepdim=True),
    "amax": lambda x, d: x.amax(d, keepdim=True),
    "amin": lambda x, d: x.amin(d, keepdim=True),
    "any": lambda x, d: x.to(torch.bool).any(d, keepdim=True),
    "all": lambda x, d: x.to(torch.bool).all(d, keepdim=True),
}

BITWISE = frozenset(
    getattr(torch.ops.aten, f"bitwise_{name}") for name in ("and", "or", "xor", "not", "left_shift", "right_shift")
)


class World(ABC):
    """Sizes and values.  ``order`` lists the axes that tensors have, outermost first."""

    def __init__(self, order: Sequence[Atom]) -> None:
        self.order = tuple(order)
        self.position = {atom: k for k, atom in enumerate(self.order)}
        self.values: dict[Term, Tensor] = {}

    @abstractmethod
    def size(self, atom: Atom) -> Any:
        """Positions of ``atom`` in this world."""

    @abstractmethod
    def leaf(self, term: Term) -> Tensor:
        """The tensor of a leaf, in the leaf's own dimensions."""

    @abstractmethod
    def index(self, term: Term) -> Tensor:
        """The values of an index term, one dimension: its ``dim`` flattened."""

    @abstractmethod
    def number(self, value: Any) -> Tensor:
        """A zero-dimensional tensor."""

    def offset(self, size: Size) -> int:
        """Where a part of a concatenation begins that really begins at ``size``."""
        raise KeyError(f"no offset {size} in this world")

    def spread(self, x: Tensor, dims: Dims) -> Tensor:
        """``x``, whose dimensions are ``dims``, with one dimension per axis of the world."""
        atoms = atoms_of(dims)
        x = x.reshape([self.size(a) for a in atoms])
        wanted = [a for a in self.order if a in atoms]
        x = x.permute([atoms.index(a) for a in wanted])
        return x.reshape([self.size(a) if a in atoms else 1 for a in self.order])

    def gather(self, x: Tensor, dims: Dims) -> Tensor:
        """The inverse of ``spread``: ``x`` laid out as ``dims``, expanded where it does not vary."""
        atoms = atoms_of(dims)
        x = self.expanded(x, atoms)
        rest = [a for a in self.order if a not in atoms]
        x = x.permute([self.position[a] for a in (*atoms, *rest)])
        return x.reshape([self.extent(d) for d in dims])

    def expanded(self, x: Tensor, atoms: Iterable[Atom]) -> Tensor:
        """``x`` with all its dimensions (a number has none), full along ``atoms``."""
        x = x.reshape([1] * (len(self.order) - x.dim()) + list(x.shape))
        along = set(atoms)
        return x.expand([self.size(a) if a in along else -1 for a in self.order])

    def extent(self, dim: Dim) -> Any:
        """The number of positions of a dimension."""
        total = 1
        for atom in dim:
            total = total * self.size(atom)
        return total


def evaluate(term: Term, world: World) -> Tensor:
    """The value of ``term``, one dimension per axis of ``world``."""
    pending = [term]
    while pending:  # an explicit stack: graphs are deeper than Python's
        top = pending[-1]
        if top in world.values:
            pending.pop()
            continue
        missing = [a for a in top.args if a not in world.values]
        if missing:
            pending.extend(missing)
            continue
        world.values[top] = _value(top, [world.values[a] for a in top.args], world)
        pending.pop()
    return world.values[term]


def _value(term: Term, args: list[Tensor], world: World) -> Tensor:
    if term.op == "leaf":
        return world.spread(world.leaf(term), term.attr[1])
    if term.op == "number":
        return world.number(term.attr)
    if term.op == "index":
        return world.spread(world.index(term), (term.attr[0],))
    if term.op == "reduce":
        return _reduce(term, args[0], world)
    if term.op == "cat":
        return _cat(term, args, world)
    if term.op == "part":
        return _part(term, args[0], world)
    if term.op == "apply":
        target, template = term.attr
        return _call(target, template, args)
    if term.op == "along":
        target, template, dims, inputs = term.attr
        laid = [world.gather(a, d) for a, d in zip(args, inputs, strict=True)]
        return world.spread(_call(target, template, laid), dims)
    if term.op == "hole":
        raise KeyError(f"the hole {term.attr} has no value in this world")
    return POINTWISE[term.op](*args)


def _call(target: Any, template: Any, args: list[Tensor]) -> Tensor:
    if getattr(target, "overloadpacket", None) in BITWISE:  # in a small instance integers are floats
        args = [x.to(torch.int64) if x.is_floating_point() else x for x in args]
    positional, named = pytree.tree_map_only(
        Slot, lambda s: args[s.position], template, is_leaf=lambda x: isinstance(x, Slot)
    )
    out = target(*positional, **dict(named))
    return out if isinstance(out, Tensor) else operator.getitem(out, 0)


def _reduce(term: Term, x: Tensor, world: World) -> Tensor:
    kind, atoms = term.attr
    inner = term.args[0].axes
    dims = [world.position[a] for a in atoms]
    if any(a not in inner for a in atoms):  # a sum over an axis that the value does not vary along counts it
        x = world.expanded(x, atoms)
    return REDUCTIONS[kind](x, dims)


def _part(term: Term, x: Tensor, world: World) -> Tensor:
    whole, piece, offset = term.attr
    at = world.position[whole]
    x = world.expanded(x, (whole,))
    x = x.narrow(at, world.offset(offset), 1 if piece is None else world.size(piece))
    return x if piece is None else x.transpose(at, world.position[piece])


def _cat(term: Term, args: list[Tensor], world: World) -> Tensor:
    atom, pieces = term.attr
    at = world.position[atom]
    parts = []
    for value, piece in zip(args, pieces, strict=True):
        x = world.expanded(value, ())
        if piece is not None and piece is not atom:
            where = world.position[piece]
            x = world.expanded(x, (piece,)).transpose(where, at)
        elif piece is atom:
            raise ValueError("a piece of a concatenation cannot run along the joined axis")
        parts.append(x)
    shape = list(torch.broadcast_shapes(*([1 if k == at else n for k, n in enumerate(p.shape)] for p in parts)))
    return torch.cat([p.expand([p.shape[at] if k == at else n for k, n in enumerate(shape)]) for p in parts], at)
