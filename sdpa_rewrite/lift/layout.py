"""Layout operators in named axes.

``pull`` says which dimensions of its input a layout operator reads for given dimensions of its output,
``push`` the reverse.  Neither knows anything about values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Size, atoms_of, regroup, same_size, shape_of
from sdpa_rewrite.lift.ops import ALIASES, PERMUTES, REGROUPS, opname, rank, value_of


def permutation(node: Node) -> list[int]:
    """Which dimension of its input each dimension of a permute reads."""
    n = rank(node.args[0])
    given: Any = node.args[1:]
    name = opname(node)
    if name == "permute":
        return [int(d) % n for d in given[0]]
    order = list(range(n))
    if n < 2:
        return order
    a, b = (0, 1) if name == "t" else (int(given[0]) % n, int(given[1]) % n)
    order[a], order[b] = order[b], order[a]
    return order


def pull(node: Node, dims: Dims) -> Dims:
    """Dimensions of ``node.args[0]`` that ``node`` reads at ``dims``.  Raises ``Refine`` or ``Irregular``."""
    name = opname(node)
    if name in ALIASES:
        return dims
    if name in PERMUTES:
        out: list[Dim] = [()] * len(dims)
        for here, there in enumerate(permutation(node)):
            out[there] = dims[here]
        return tuple(out)
    shape = shape_of(value_of(node.args[0]))
    if name in REGROUPS:
        return regroup(atoms_of(dims), shape)
    if name == "expand":
        kept = dims[len(dims) - len(shape) :]
        return tuple(() if same_size(n, 1) else dim for n, dim in zip(shape, kept, strict=True))
    if name == "repeat":
        kept = dims[len(dims) - len(shape) :]
        times: Any = node.args[1]
        counts = times[len(times) - len(shape) :]
        return tuple(_tile(dim, r, n) for dim, r, n in zip(kept, counts, shape, strict=True))
    raise Irregular(f"{name} is not a layout operator")


def _tile(dim: Dim, times: Any, size: Size) -> Dim:
    times = value_of(times)
    if same_size(size, 1):
        return ()
    if isinstance(times, int) and times == 1:
        return dim
    return regroup(dim, (times, size))[1]


def push(node: Node, dims: Dims, fresh: Callable[[int, Size], Atom]) -> Dims:
    """Dimensions of ``node`` whose input has ``dims``; ``fresh(position, size)`` names the axes an expand adds."""
    name = opname(node)
    if name in ALIASES:
        return dims
    if name in PERMUTES:
        return tuple(dims[there] for there in permutation(node))
    shape = shape_of(value_of(node))
    if name in REGROUPS:
        return regroup(atoms_of(dims), shape)
    if name == "expand":
        lead = len(shape) - len(dims)
        padded: Dims = ((),) * lead + dims
        return tuple(
            dim if dim or same_size(n, 1) else (fresh(k, n),)
            for k, (dim, n) in enumerate(zip(padded, shape, strict=True))
        )
    raise Irregular(f"{name} is not followed from its input")
