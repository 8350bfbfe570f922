"""Real tensors in named axes: how a replacement reads its operands and lays out its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Size, atoms_of, shape_of, size_of
from sdpa_rewrite.algebra.hints import estimated, hints_of
from sdpa_rewrite.algebra.interpret import World
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.emit.guarded import environment_of, equal_sizes
from sdpa_rewrite.site import Operand


class Unavailable(Exception):
    """A symbolic size or number cannot be recovered from the tensors at hand."""


class Sizes:
    """The sizes of axes, read off the shapes of tensors: numbers where they are static, else what the trace follows."""

    def __init__(self, tensors: Iterable[tuple[Tensor, Dims]], numbers: Mapping[sympy.Symbol, Any]) -> None:
        self._known: dict[str, Any] = {str(s): v for s, v in numbers.items()}
        pairs = [(n, d) for x, dims in tensors for n, d in zip(x.shape, dims, strict=True)]
        for _ in range(3):  # a dimension made of several axes is solved once all but one are known
            for extent, dim in pairs:
                self._learn(extent, dim)

    def _learn(self, extent: Any, dim: Dim) -> None:
        open_atoms = [a for a in dim if not isinstance(a.size, int) and str(a.size) not in self._known]
        if len(open_atoms) != 1:
            return
        value = extent
        for atom in dim:
            if atom is not open_atoms[0]:
                value = value // self.of(atom.size)
        self._known[str(open_atoms[0].size)] = value

    def of(self, size: Size) -> Any:
        """The size as an int or a SymInt.  Raises ``Unavailable``."""
        if isinstance(size, int):
            return size
        if str(size) in self._known:
            return self._known[str(size)]
        return self.number(size)

    def number(self, expr: sympy.Basic) -> Any:
        """The value of a symbolic expression.  Raises ``Unavailable``."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        env = {s: self._known[str(s)] for s in expr.free_symbols if str(s) in self._known}
        if len(env) < len(expr.free_symbols):
            raise Unavailable(f"the value of {expr} is not at hand")
        return sympy_interp(PythonReferenceAnalysis, env, expr)


def arrange(x: Tensor, dims: Dims, groups: Sequence[Dim], sizes: Sizes, fill: Sequence[bool] | None = None) -> Tensor:
    """``x``, whose dimensions are ``dims``, with one dimension per group of axes.

    Axes that ``x`` lacks are broadcast.  Where ``fill`` is False, a group of which ``x`` has no axis stays of size one.
    A view wherever strides allow.
    """
    atoms = atoms_of(dims)
    if len(atoms) != len(dims) or any(len(d) != 1 for d in dims):
        x = x.reshape([sizes.of(a.size) for a in atoms])
    wanted = [a for g in groups for a in g]
    present = [a for a in wanted if a in atoms]
    order = [atoms.index(a) for a in present]
    if order != list(range(len(order))):
        x = x.permute(order)
    if len(present) < len(wanted):
        for k, atom in enumerate(wanted):
            if atom not in atoms:
                x = x.unsqueeze(k)
    fills = fill or [True] * len(groups)
    full: list[Any] = []
    for group, wide in zip(groups, fills, strict=True):
        some = wide or any(a in atoms for a in group)
        full += [sizes.of(a.size) if some else 1 for a in group]
    if len(present) < len(wanted):
        x = x.expand(full)
    shape: list[Any] = []
    at = 0
    for group in groups:
        extent: Any = 1
        for _ in group:
            extent = extent * full[at]
            at += 1
        shape.append(extent)
    return x.reshape(shape) if len(shape) != len(full) or any(len(g) != 1 for g in groups) else x


class RealWorld(World):
    """The world of a replacement: real tensors for the leaves, sizes as the trace sees them."""

    def __init__(
        self,
        order: Sequence[Atom],
        sizes: Sizes,
        leaves: Mapping[Any, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(order)
        self.sizes, self.leaves, self.device, self.dtype = sizes, leaves, device, dtype

    def size(self, atom: Atom) -> Any:
        """Positions of ``atom``, as the trace sees them."""
        return self.sizes.of(atom.size)

    def leaf(self, term: Term) -> Tensor:
        """The tensor that stands for a leaf."""
        leaf: Tensor = self.leaves[term.attr[0]]
        return leaf

    def index(self, term: Term) -> Tensor:
        """0, 1, 2, ... times step plus start."""
        dim, start, step = term.attr
        flat: Tensor = torch.arange(self.extent(dim), device=self.device)
        return flat.mul(self.sizes.of(size_of(step))).add(self.sizes.of(size_of(start)))

    def number(self, value: Any) -> Tensor:
        """A zero-dimensional tensor of the world's type, on the device of the operands."""
        if isinstance(value, sympy.Basic):
            value = self.sizes.number(value)
        if isinstance(value, bool):
            return torch.full((), value, dtype=torch.bool, device=self.device)
        return torch.full((), value, dtype=self.dtype, device=self.device)

    def place(self, operand: Operand, x: Tensor) -> Tensor:
        """A tensor with one dimension per axis of this world."""
        groups: list[Dim] = [(a,) for a in self.order]
        return arrange(x, operand.dims, groups, self.sizes, [False] * len(groups))


def strides_of(x: Tensor) -> tuple[Size, ...]:
    """Strides, with ``Max(1, n)`` as ``n``: they differ for an empty tensor only, whose strides do not matter."""
    return tuple(_plain(size_of(s)) for s in x.stride())


def _plain(stride: Size) -> Size:
    if isinstance(stride, int):
        return stride
    largest = [f for f in sympy.preorder_traversal(stride) if type(f).__name__ == "Max" and len(f.args) == 2]
    known = {f: f.args[1] if f.args[0] == 1 else f.args[0] for f in largest if 1 in f.args}
    return size_of(stride.xreplace(known))


def same_shapes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape whenever the graph runs."""
    where = environment_of(x, y)
    return x.dim() == y.dim() and all(equal_sizes(a, b, where) for a, b in zip(shape_of(x), shape_of(y), strict=True))


def same_strides(x: Tensor, y: Tensor) -> bool:
    """Whether tensors of one shape are laid out alike.  The stride of a dimension of one position does not matter."""
    where = environment_of(x, y)
    return all(
        size_of(n) == 1 or equal_sizes(a, b, where)
        for n, a, b in zip(x.shape, strides_of(x), strides_of(y), strict=True)
    )


def restrided(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the strides of ``like``, copied only where they differ."""
    if tuple(map(size_of, x.stride())) == tuple(map(size_of, like.stride())):
        return x
    strides, known = strides_of(like), hints_of([like])
    order = sorted(range(x.dim()), key=lambda k: (estimated(strides[k], known), -k), reverse=True)
    y = x.permute(order).contiguous().permute([order.index(k) for k in range(x.dim())])
    if not same_strides(y, like):
        raise Unavailable(f"strides {like.stride()} cannot be kept")
    return y
