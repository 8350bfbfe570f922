"""Reductions, contractions and softmax operators as terms: a contraction is the sum of a product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Dim, Dims, Irregular, shape_of
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.lift.ops import SOFTMAXES, argument, opname, value_of

if TYPE_CHECKING:
    from sdpa_rewrite.lift.lifter import Lifter


def lift(lifter: Lifter, node: Node, dims: Dims) -> Term | None:
    """The term of a reduction or a softmax."""
    name = opname(node)
    if name in SOFTMAXES:
        return softmax(lifter, node, dims)
    if name == "_softmax_backward_data":
        return softmax_backward(lifter, node, dims)
    if name == "max":
        return None if len(node.args) > 1 else reduce(lifter, node, dims, "amax")
    if name == "logsumexp":
        return _logsumexp(lifter, node, dims)
    if name == "mean":
        total, count = inner(lifter, node, dims)
        share = lifter.terms.call("div", lifter.terms.number(1.0), lifter.terms.number(count))
        return lifter.terms.call("mul", total, share)
    return reduce(lifter, node, dims, name)


def reduced_dims(node: Node) -> tuple[list[int], bool]:
    """Which dimensions of its input a reduction removes, and whether it keeps them as size one."""
    n = len(shape_of(value_of(node.args[0])))
    which: Any = argument(node, 1, "dim")
    if which is None or (isinstance(which, (list, tuple)) and not which):
        which = list(range(n))
    if isinstance(which, int):
        which = [which]
    if not isinstance(which, (list, tuple)):
        raise Irregular(f"{opname(node)} over {which!r}")
    return [d % n for d in which] if n else [], bool(argument(node, 2, "keepdim", False))


def input_dims(lifter: Lifter, node: Node, dims: Dims) -> tuple[Dims, Dim]:
    """The dimensions that a reduction reads, and the axes it removes."""
    shape = shape_of(value_of(node.args[0]))
    removed, keep = reduced_dims(node)
    outer = iter(dims)
    below: list[Dim] = []
    gone: list[Any] = []
    for k, size in enumerate(shape):
        if k in removed:
            if keep:
                next(outer)
            dim = lifter.bind((node, k), size, (*dims, tuple(gone)), "r")
            gone.extend(dim)
            below.append(dim)
        else:
            below.append(next(outer))
    return tuple(below), tuple(gone)


def reduce(lifter: Lifter, node: Node, dims: Dims, kind: str) -> Term:
    """The term of one reduction."""
    below, gone = input_dims(lifter, node, dims)
    x = lifter.request(node.args[0], below)  # type: ignore[arg-type]
    if kind == "sum" and not value_of(node.args[0]).dtype.is_floating_point:
        x = lifter.terms.call("int", x)
    return lifter.terms.reduce(kind, x, gone)


def inner(lifter: Lifter, node: Node, dims: Dims) -> tuple[Term, Any]:
    """A sum, and how many positions it is over."""
    below, gone = input_dims(lifter, node, dims)
    count: Any = 1
    for atom in gone:
        count = count * atom.size
    return lifter.terms.reduce("sum", lifter.request(node.args[0], below), gone), count  # type: ignore[arg-type]


def _logsumexp(lifter: Lifter, node: Node, dims: Dims) -> Term:
    terms = lifter.terms
    below, gone = input_dims(lifter, node, dims)
    x = lifter.request(node.args[0], below)  # type: ignore[arg-type]
    top = terms.reduce("amax", x, gone)
    total = terms.reduce("sum", terms.call("exp", terms.call("sub", x, top)), gone)
    return terms.call("add", terms.call("log", total), top)


def softmax(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """The term of a softmax, spelled out."""
    terms = lifter.terms
    x = lifter.request(node.args[0], dims)  # type: ignore[arg-type]
    dim: Any = argument(node, 1, "dim")
    gone = dims[dim % len(dims)]
    top = terms.reduce("amax", x, gone)
    shifted = terms.call("sub", x, top)
    e = terms.call("exp", shifted)
    total = terms.reduce("sum", e, gone)
    if opname(node) == "_log_softmax":
        return terms.call("sub", shifted, terms.call("log", total))
    probability = terms.call("div", e, total)
    if opname(node) != "_safe_softmax":
        return probability
    empty = terms.reduce("all", terms.call("eq", x, terms.number(float("-inf"))), gone)
    return terms.call("where", empty, terms.number(0.0), probability)


def softmax_backward(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """dX = (dP - sum(dP * P)) * P"""
    terms = lifter.terms
    grad, out = (lifter.request(a, dims) for a in node.args[:2])  # type: ignore[arg-type]
    dim: Any = node.args[2]
    gone = dims[dim % len(dims)]
    total = terms.reduce("sum", terms.call("mul", grad, out), gone)
    return terms.call("mul", terms.call("sub", grad, total), out)


def contraction(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """bmm, mm and their additive forms: sum over the shared axis of the product, operands seen through layout."""
    name = opname(node)
    left, right = node.args[-2:] if name in ("baddbmm", "addmm") else node.args[:2]
    if name in ("baddbmm", "addmm"):
        left, right = node.args[1:3]
    if len(dims) not in (2, 3) or any(len(shape_of(value_of(x))) != len(dims) for x in (left, right)):
        raise Irregular(f"{name} of operands of other ranks")
    shared = lifter.bind((node, "k"), shape_of(value_of(left))[-1], dims, "d")
    a = side(lifter, left, (*dims[:-1], shared))
    b = side(lifter, right, (*dims[:-2], shared, dims[-1]))
    terms = lifter.terms
    out = terms.reduce("sum", terms.call("mul", a, b), shared)
    if name not in ("baddbmm", "addmm"):
        return out
    alpha, beta = (lifter.scalar(node.kwargs.get(k, 1)) for k in ("alpha", "beta"))
    out = terms.call("mul", out, alpha)
    if beta.attr == 0:  # the added tensor is not read
        return out
    added = lifter.broadcast(node.args[0], dims)
    return terms.call("add", terms.call("mul", added, beta), out)


def side(lifter: Lifter, node: Any, dims: Dims) -> Term:
    """An operand of a contraction: opened where it is interior, else a leaf behind its layout."""
    below, term_dims = node, dims
    return lifter.request(below, term_dims) if node in lifter.interior else lifter.operand(below, term_dims)
