"""Pointwise operators, constants and indices as terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.axes import Dims, Irregular, size_of
from sdpa_rewrite.algebra.term import Slot, Term
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.lift.ops import CASTS, argument, opname, value_of

if TYPE_CHECKING:
    from sdpa_rewrite.lift.lifter import Lifter

SAME = {  # operator -> name, operands in order
    "mul": "mul",
    "exp": "exp",
    "log": "log",
    "sqrt": "sqrt",
    "tanh": "tanh",
    "neg": "neg",
    "where": "where",
    "maximum": "maximum",
    "minimum": "minimum",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "true_divide": "div",
}
SWAPPED = {"gt": "lt", "ge": "le"}  # a > b -> b < a
BOOLEAN = {
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
    "mul": "and",
    "__and__": "and",
    "__or__": "or",
}


def lift(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """The term of a pointwise operator."""
    name = opname(node)
    terms = lifter.terms
    if name in CASTS:
        return cast(lifter, node, dims)
    args = [lifter.broadcast(a, dims) for a in node.args] if name not in ("clamp", "div") and _plain(node) else []
    if args and name in BOOLEAN and _is_bool(node) and all(_is_bool(a) for a in node.args):
        return terms.call(BOOLEAN[name], *args)
    if name in ("add", "sub", "rsub"):
        return _add(lifter, node, dims)
    if name == "div":
        if node.kwargs.get("rounding_mode") is not None:
            return generic(lifter, node, dims)
        return terms.call("div", *(lifter.broadcast(a, dims) for a in node.args[:2]))
    if name == "clamp":
        return _clamp(lifter, node, dims)
    if args and name == "exp2":
        return terms.call("exp", terms.call("mul", args[0], terms.number(math.log(2.0))))
    if args and name in SAME:
        return terms.call(SAME[name], *args)
    if args and name in SWAPPED:
        return terms.call(SWAPPED[name], args[1], args[0])
    if args and name == "fma":
        return terms.call("add", terms.call("mul", args[0], args[1]), args[2])
    if args and name == "masked_fill":
        return terms.call("where", args[1], args[2], args[0])
    if args and name == "reciprocal":
        return terms.call("div", terms.number(1.0), args[0])
    if args and name == "square":
        return terms.call("mul", args[0], args[0])
    if args and name == "rsqrt" and args[0].op == "number":
        return terms.call("pow", args[0], terms.number(-0.5))
    if args and name == "pow" and args[0].op == "number":
        return terms.call("pow", *args)
    return generic(lifter, node, dims)


def _plain(node: Node) -> bool:
    """Only tensors and numbers among the arguments."""
    return not node.kwargs and all(isinstance(value_of(a), (torch.Tensor, *_SCALARS)) for a in node.args)


_SCALARS: tuple[type, ...] = (bool, int, float, torch.SymInt, torch.SymFloat)


def _is_bool(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)


def _add(lifter: Lifter, node: Node, dims: Dims) -> Term:
    terms = lifter.terms
    a, b = (lifter.broadcast(x, dims) for x in node.args[:2])
    if opname(node) == "rsub":
        a, b = b, a
    alpha = lifter.scalar(argument(node, 2, "alpha", 1))
    if opname(node) == "rsub":
        a = terms.call("mul", a, alpha)
        return terms.call("sub", a, b)
    return terms.call("add" if opname(node) == "add" else "sub", a, terms.call("mul", b, alpha))


def _clamp(lifter: Lifter, node: Node, dims: Dims) -> Term:
    x = lifter.broadcast(node.args[0], dims)
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if low is not None:
        x = lifter.terms.call("maximum", x, lifter.broadcast(low, dims))
    if high is not None:
        x = lifter.terms.call("minimum", x, lifter.broadcast(high, dims))
    return x


def cast(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """A cast between floating types keeps its place in the graph but not in the term: precision is not meaning."""
    x = lifter.broadcast(node.args[0], dims)
    source, target = value_of(node.args[0]).dtype, value_of(node).dtype
    if x.op == "number":
        return rounded(lifter, x, target)
    if target == torch.bool:
        return x if source == torch.bool else lifter.terms.call("ne", x, lifter.terms.number(0))
    if target.is_floating_point and source.is_floating_point:
        return _narrowed(lifter, node, dims, x)
    if target.is_floating_point:
        return lifter.terms.call("float", x)
    if source.is_floating_point or source == torch.bool:
        return lifter.terms.call("int", x)
    return x


BOUNDED = frozenset({"exp", "tanh", "eq", "ne", "lt", "le", "float"})  # of any argument of the forward


def _narrowed(lifter: Lifter, node: Node, dims: Dims, x: Term) -> Term:
    """A cast to a type of smaller range keeps the term, but a fill that it rounds to infinity becomes infinite.

    What may be such a fill is a leaf: the same one for each cast of it, in the backward too.  (A float that may change
    is a float64 tensor, which Dynamo casts anew at each use.)
    """
    source, target = value_of(node.args[0]).dtype, value_of(node).dtype
    kept = lifter.narrowed.get((node.args[0], target))
    if kept is not None:
        return lifter.leaf(kept, dims)
    limit = torch.finfo(target).max
    if torch.finfo(source).max <= limit or lifter.backward:
        return x
    if x.op == "number":
        return rounded(lifter, x, target)
    if x.op == "where":
        chosen = (rounded(lifter, a, target) if a.op == "number" else a for a in x.args[1:])
        x = lifter.terms.call("where", x.args[0], *chosen)
    if not any(_exceeds(t, limit) for t in _unbounded(x)) or lifter.is_scalar(x):
        return x
    if node in lifter.interior:
        raise Irregular(f"a cast to {target} may turn a finite fill into infinity")
    lifter.narrowed[node.args[0], target] = node
    return lifter.leaf(node, dims)


def _unbounded(term: Term) -> Iterator[Term]:
    """Leaves and numbers that set the size of ``term``; scores themselves are of a sane size."""
    if term.op in BOUNDED:
        return
    if term.op in ("leaf", "number"):
        yield term
    scores = term.op == "reduce" and term.args[0].op == "mul" and all(a.op == "leaf" for a in term.args[0].args)
    if not scores:
        for arg in term.args[1:] if term.op == "where" else term.args:
            yield from _unbounded(arg)


def _exceeds(term: Term, limit: float) -> bool:
    if term.op == "number":
        return isinstance(term.attr, (int, float)) and limit < abs(term.attr) < math.inf
    dtype = value_of(term.attr[0]).dtype
    return bool(dtype.is_floating_point and torch.finfo(dtype).max > limit)


def rounded(lifter: Lifter, x: Term, dtype: torch.dtype) -> Term:
    """A number as ``dtype`` holds it."""
    value = x.attr
    if not isinstance(value, (bool, int, float)):
        return x
    if dtype == torch.bool:
        return lifter.terms.number(bool(value))
    if dtype.is_floating_point:
        value = float(value)
        exact = torch.tensor(value, dtype=torch.float64).to(dtype).item()
        keeps = math.isfinite(value) and math.isfinite(exact) and abs(value) < 1e30
        return lifter.terms.number(value if keeps else exact)  # huge fills may round to infinity, and then are infinite
    return lifter.terms.number(int(value))


def constant(lifter: Lifter, node: Node, name: str) -> Term:
    """The term of a tensor filled with one number."""
    dtype = value_of(node).dtype
    if name in ("full", "full_like"):
        value = lifter.scalar(argument(node, 1, "fill_value"))
    elif name == "scalar_tensor":
        value = lifter.scalar(node.args[0])
    else:
        value = lifter.terms.number(1.0 if name.startswith("ones") else 0.0)
    return rounded(lifter, value, dtype)


def written(lifter: Lifter, node: Node) -> Term | None:
    """The number in a ``torch.tensor(number)`` of the program, which the graph holds as a constant of its own."""
    owner = node.graph.owning_module
    value = getattr(owner, str(node.target), None)
    if type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu" or value.is_complex():
        return None
    with clean_room():
        return rounded(lifter, lifter.terms.number(value.item()), value.dtype)


def iota(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """The term of a range."""
    start, step = (size_of(value_of(node.kwargs.get(k, d))) for k, d in (("start", 0), ("step", 1)))
    return lifter.terms.index(dims[0], start, step)


def triangle(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """tril(x, k) keeps column <= row + k; triu(x, k) keeps column >= row + k; the rest is zero."""
    terms = lifter.terms
    x = lifter.request(node.args[0], dims)  # type: ignore[arg-type]
    row, column = terms.index(dims[-2]), terms.index(dims[-1])
    edge = terms.call("add", row, lifter.scalar(argument(node, 1, "diagonal", 0)))
    keep = terms.call("le", column, edge) if opname(node) == "tril" else terms.call("le", edge, column)
    zero: Any = False if _is_bool(node) else 0.0
    return terms.call("where", keep, x, terms.number(zero))


def generic(lifter: Lifter, node: Node, dims: Dims) -> Term:
    """Any other pointwise operator, evaluated by itself."""
    found: list[Term] = []

    def place(value: Any) -> Any:
        if isinstance(value, Node) and isinstance(value_of(value), torch.Tensor):
            found.append(lifter.broadcast(value, dims))
            return Slot(len(found) - 1)
        if isinstance(value, Node):
            number = lifter.scalar(value)
            if number.op != "number" or not isinstance(number.attr, (bool, int, float)):
                raise Irregular(f"{opname(node)} of a symbolic number")
            return number.attr
        return value

    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dtype", "device", "layout", "memory_format")}
    positional, named = pytree.tree_map(place, (tuple(node.args), kwargs))
    return lifter.terms.apply(node.target, template_of(positional, tuple(sorted(named.items()))), *found)


def template_of(positional: Any, named: Any = ()) -> tuple[Any, Any]:
    """A hashable (args, kwargs), with ``Slot`` where a term goes."""
    return _freeze(positional), _freeze(named)


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value
