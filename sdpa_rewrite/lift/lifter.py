"""From graph nodes to terms, on demand.

``request(node, dims)`` is the value of ``node`` where its dimensions run over ``dims``.  The demand travels
from a result to its operands, so one node that is read along two axes (an ``arange`` as row and as column)
simply becomes two terms.  A view that does not fall on the boundaries of the axes raises ``Refine``; the
caller splits the axis and asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch.fx import Node

from sdpa_rewrite.algebra.axes import (
    Atom,
    Dim,
    Dims,
    Irregular,
    Refine,
    Size,
    Window,
    atoms_of,
    product,
    quotient,
    same_size,
    shape_of,
    size_of,
)
from sdpa_rewrite.algebra.term import Term, Terms
from sdpa_rewrite.lift import along, pieces, pointwise, reductions
from sdpa_rewrite.lift.layout import pull
from sdpa_rewrite.lift.ops import (
    CASTS,
    CONTRACTIONS,
    LAYOUT,
    NUMBERS,
    PIECEWISE,
    REDUCTIONS,
    SOFTMAXES,
    argument,
    is_call,
    is_piece,
    is_pointwise,
    opname,
    value_of,
)
from sdpa_rewrite.site import Operand

BUDGET = 2000  # terms a neighbourhood may have: masks are small, a runaway chain is not a mask


class CannotWindow(Exception):
    """A slice of this value is not a simple read of its operands."""


class Axes:
    """The axes of one neighbourhood.  They outlive a restart, with what each was split into."""

    def __init__(self) -> None:
        self._atoms: dict[Any, Atom] = {}
        self._split: dict[Atom, tuple[Atom, Atom]] = {}

    def atom(self, key: Any, size: Size, name: str) -> Atom:
        """The axis known as ``key``, made when first asked for."""
        if key not in self._atoms:
            self._atoms[key] = Atom(name, size)
        return self._atoms[key]

    def dim(self, key: Any, size: Size, name: str) -> Dim:
        """The axes of a dimension of ``size``: none for a size of one."""
        if same_size(size, 1):
            return ()
        return self.resolve((self.atom(key, size, name),))

    def split(self, refine: Refine) -> None:
        """Write an axis as the product of two from now on.  Raises ``Irregular``."""
        if refine.atom in self._split:
            raise Irregular(f"{refine.atom} was split already")
        name = refine.atom.name
        self._split[refine.atom] = (Atom(name + "0", refine.outer), Atom(name + "1", refine.inner))

    def after(self, refine: Refine) -> Axes:
        """The same axes, one of them split, beside these.  Raises ``Irregular``."""
        other = Axes()
        other._atoms, other._split = dict(self._atoms), dict(self._split)
        other.split(refine)
        return other

    def resolve(self, dim: Dim) -> Dim:
        """``dim`` with split axes replaced by their parts."""
        out: list[Atom] = []
        for atom in dim:
            out.extend(self.resolve(self._split[atom]) if atom in self._split else (atom,))
        return tuple(out)


class Lifter:
    """Terms of one neighbourhood.

    ``interior``: nodes between the contraction with the keys and the contraction with the values (and, for the
    backward, what depends on them); only these are opened through reductions and contractions.
    ``keys``: the axes that the probabilities are contracted over, known once the root has been requested.
    """

    def __init__(self, axes: Axes, interior: set[Node]) -> None:
        self.axes = axes
        self.terms = Terms()
        self.interior = interior
        self.bound: list[Dim] = []
        self.backward = False  # reading the backward: a gradient scattered into a concatenation is opened
        self.memo: dict[tuple[Node, Dims], Term] = {}
        self.hints: dict[Any, Dim] = {}  # axes for reduced dimensions, where the reader of the backward knows them
        self._seen: dict[Node, Dims] = {}
        self.asked: dict[Term, tuple[Node, Dims]] = {}
        self.narrowed: dict[tuple[Any, torch.dtype], Node] = {}  # casts that are leaves, by what they cast and to what
        self._closed: set[Node] = set()  # operands of contractions: read as leaves everywhere

    def request(self, node: Node, dims: Dims) -> Term:
        """The term of ``node`` at ``dims``.  Raises ``Refine``, ``Irregular`` or ``CannotWindow``."""
        key = (node, dims)
        term = self.memo.get(key)
        if term is None:
            if len(self.memo) > BUDGET:
                raise Irregular("the neighbourhood is too large to be read as one attention")
            term = self._lift(node, dims)
            self.memo[key] = term
            self.asked.setdefault(term, key)
        return term

    def operand(self, node: Node, dims: Dims) -> Term:
        """``node`` seen through layout and widening casts only: an operand of a contraction."""
        while is_call(node):
            name = opname(node)
            if name in LAYOUT:
                try:
                    below = pull(node, dims)
                except Irregular:
                    break
                node, dims = node.args[0], below  # type: ignore[assignment]
            elif name in CASTS and widens(node):
                node = node.args[0]  # type: ignore[assignment]
            else:
                break
        if node not in self.interior:
            self._closed.add(node)
        return self.leaf(node, dims)

    def close(self, nodes: Iterable[Node]) -> None:
        """Read ``nodes`` as leaves everywhere."""
        self._closed |= set(nodes)

    def is_scalar(self, term: Term) -> bool:
        """Whether ``term`` is a closed tensor of one number: a number as good as any."""
        return term.op == "leaf" and not term.axes and term.attr[0] in self._closed and not value_of(term.attr[0]).dim()

    def leaf(self, node: Node, dims: Dims) -> Term:
        """``node`` as a tensor that is not looked into."""
        if any(isinstance(a, Window) for a in atoms_of(dims)):
            raise CannotWindow(node.name)
        value = value_of(node)
        if value.is_complex() or value.layout is not torch.strided or value.is_nested:
            raise Irregular(f"{node.name} is a complex, sparse or nested tensor")
        align_all(dims, self._seen.setdefault(node, dims))
        term = self.terms.leaf(node, dims)
        self.asked.setdefault(term, (node, dims))
        return term

    def spellings(self, term: Term, within: frozenset[Atom]) -> list[Operand]:
        """Tensors of the graph that hold ``term``, perhaps repeated along other axes of ``within``."""
        held = (Operand(n, d) for (n, d), t in self.memo.items() if t is term and _distinct(d))
        return [o for o in held if o.axes <= within]

    def scalar(self, value: Any) -> Term:
        """A Python number, a symbolic number, or the node of one."""
        value = value_of(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expr = value.node.expr
            value = int(expr) if isinstance(expr, sympy.Integer) else float(expr) if expr.is_Float else expr
        if not isinstance(value, (bool, int, float, sympy.Basic)):
            raise Irregular(f"{value!r} is not a number")
        return self.terms.number(value)

    def bind(self, key: Any, size: Size, dims: Dims, name: str) -> Dim:
        """Axes for a dimension that is reduced away: those of the keys where they fit, so that equal values agree."""
        if same_size(size, 1):
            return ()
        used = set(atoms_of(dims))
        used |= {a.base for a in used if isinstance(a, Window)}
        for dim in (self.hints.get(key, ()), *self.bound):
            if dim and same_size(product(dim), size) and not used & set(dim):
                return dim
        for trial in range(4):
            dim = self.axes.dim((key, trial), size, name)
            if not used & set(dim):
                return dim
        raise Irregular("no axis is free for a dimension of {}", size)

    def broadcast(self, node: Any, dims: Dims) -> Term:
        """An argument of a pointwise operator whose result runs over ``dims``."""
        if not isinstance(value_of(node), torch.Tensor):
            return self.scalar(node)
        shape = shape_of(value_of(node))
        kept = dims[len(dims) - len(shape) :]
        mine = tuple(() if same_size(n, 1) else d for n, d in zip(shape, kept, strict=True))
        return self.request(node, mine)

    def _lift(self, node: Node, dims: Dims) -> Term:
        if node.op == "get_attr" and not dims:
            written = pointwise.written(self, node)
            return self.leaf(node, dims) if written is None else written
        if not is_call(node) or node in self._closed:
            return self.leaf(node, dims)
        name = opname(node)
        try:
            lifted = self._open(node, name, dims)
        except CannotWindow:
            if any(isinstance(a, Window) for a in atoms_of(dims)):
                raise
            lifted = None
        except Irregular:
            lifted = None
        return self.leaf(node, dims) if lifted is None else lifted

    def _open(self, node: Node, name: str, dims: Dims) -> Term | None:
        if name in LAYOUT:
            return self.request(node.args[0], pull(node, dims))  # type: ignore[arg-type]
        if name in NUMBERS:
            return pointwise.constant(self, node, name)
        if name == "copy" and value_of(node.args[1]).dtype == value_of(node).dtype:
            return self.broadcast(node.args[1], dims)
        handler = self._handler(node, name, dims)
        return handler(self, node, dims) if handler else None

    def _handler(self, node: Node, name: str, dims: Dims) -> Callable[[Lifter, Node, Dims], Term | None] | None:
        inside = node in self.interior
        if name == "iota":
            return pointwise.iota
        if name in PIECEWISE:
            joins = name in ("slice_scatter", "cat") and self.backward
            return pieces.lift if inside or name == "slice" or joins else None
        if name == "index" and not inside:
            return pieces.identity_gather
        if name in CONTRACTIONS:
            return reductions.contraction if inside or self._covers_keys(dims) else None
        if name in REDUCTIONS or name in SOFTMAXES or name in ("max", "logsumexp", "_softmax_backward_data"):
            return reductions.lift if inside else None
        if name == "getitem":
            return (pieces.part if is_piece(node) else along.getitem) if inside else None
        if name in ("scatter", "cumsum", "flip"):
            return along.whole if inside else None
        if name in ("tril", "triu"):
            return pointwise.triangle
        return pointwise.lift if is_pointwise(node) else None

    def _covers_keys(self, dims: Dims) -> bool:
        """A contraction outside the interior is opened when it runs over the keys: it may be the scores."""
        keys = set(self.bound[0]) if self.bound else set()
        return keys <= set(atoms_of(dims))


def _distinct(dims: Dims) -> bool:
    atoms = atoms_of(dims)
    return len(set(atoms)) == len(atoms) and not any(isinstance(a, Window) for a in atoms)


def widens(node: Node) -> bool:
    """A cast between floating types that keeps every value."""
    source, target = value_of(node.args[0]), value_of(node)
    if not (isinstance(source, torch.Tensor) and source.dtype.is_floating_point and target.dtype.is_floating_point):
        return False
    return bool(torch.promote_types(source.dtype, target.dtype) == target.dtype)


def align_all(mine: Dims, other: Dims) -> None:
    """One tensor read twice: its dimensions must be cut at the same places.  Raises ``Refine`` where they are not."""
    if mine != other:
        for a, b in zip(mine, other, strict=True):
            if a and b:
                align(a, b)


def align(mine: Dim, other: Dim) -> None:
    """``align_all`` for one dimension."""
    for a, b in zip(mine, other, strict=False):
        if same_size(a.size, b.size):
            continue
        ratio = quotient(a.size, b.size)
        if ratio is not None:
            raise Refine(a, b.size, ratio)
        ratio = quotient(b.size, a.size)
        if ratio is not None:
            raise Refine(b, a.size, ratio)
        raise Irregular("{} and {} cut one dimension at different places", a, b)


def size_argument(node: Node, position: int, name: str, default: Any) -> Size:
    """A size among the arguments."""
    return size_of(value_of(argument(node, position, name, default)))
