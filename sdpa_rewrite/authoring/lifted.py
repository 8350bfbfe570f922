"""A pattern's own trace: what its function computes, as a graph over its parameters."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.axes import Dims, Irregular, Refine, shape_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.authoring.hole import program_op
from sdpa_rewrite.authoring.opener import Again, Opener
from sdpa_rewrite.authoring.parameters import Parameter, PatternError, Variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.lift.lifter import Axes, CannotWindow, Lifter
from sdpa_rewrite.lift.ops import CASTS, CONTRACTIONS, LAYOUT, is_call, opname, value_of

HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)  # sizes that stand for unknown ones while tracing
RESTARTS = 32


@dataclass(frozen=True)
class LiftedPattern:
    """One variant of a pattern as a graph.

    ``symbols``: the size of each named axis.  ``parameters``: by placeholder.  ``roots``: the results, layout looked
    through; ``terms`` the same as a whole, and ``dims`` their dimensions.  ``program_dims``: the dimensions of what
    each program is a function of.  ``apart``: names that stand for several axes at once (a square).
    """

    name: str
    function: Callable[..., Any]
    variant: Variant
    graph: Graph
    symbols: Mapping[str, sympy.Symbol]
    parameters: Mapping[Node, Parameter]
    results: tuple[Node, ...]
    opener: Opener
    roots: tuple[Term, ...]
    terms: tuple[Term, ...]
    dims: tuple[Dims, ...]
    program_dims: Mapping[str, Dims]
    apart: frozenset[sympy.Symbol]

    @property
    def size(self) -> int:
        """The number of its parameters and of the operators that are read one by one."""
        return len(self.parameters) + sum(t.attr[0] not in self.parameters for t in self.opener.opened())

    def placeholder(self, name: str) -> Node:
        """The node of a parameter."""
        return next(n for n, p in self.parameters.items() if p.name == name)


def lifted(name: str, function: Callable[..., Any], variant: Variant, any_size: bool = True) -> LiftedPattern:
    """Trace and lift one variant; ``any_size``: its axes must stay symbolic.  Raises ``PatternError``."""
    graph, symbols, placeholders = _traced(name, function, variant, any_size)
    declared = [p for p in variant.parameters if p.kind != "program"]
    parameters = dict(zip(placeholders, declared, strict=True))
    results = tuple(pytree.tree_leaves(next(n for n in graph.nodes if n.op == "output").args[0]))
    _check_results(name, results)
    opener, whole, roots, terms, dims = _lifted(name, graph, results)
    programs = {str(n.args[1]): d for (n, d) in reversed(whole.memo) if n.target is program_op()}
    return LiftedPattern(
        name,
        function,
        variant,
        graph,
        symbols,
        parameters,
        results,
        opener,
        roots,
        terms,
        dims,
        programs,
        _apart(terms),
    )


def _check_results(name: str, results: Sequence[Any]) -> None:
    for result in results:
        if not isinstance(result, Node) or not isinstance(value_of(result), Tensor):
            raise PatternError(f"{name}: a pattern returns tensors, not {result!r}")
        if not is_call(result):
            raise PatternError(f"{name}: a result is a parameter as it is")


def axes_that_agree(
    function: Callable[..., Any], parameters: Sequence[Parameter], hints: Mapping[str, int]
) -> dict[str, str]:
    """Which axis each axis is, where ``function`` works only if they have one size; ``hints``: sizes to trace with."""
    variant = Variant(tuple(parameters))
    with clean_room():
        _, symbols, _ = _traced(function.__name__, function, variant, True, hints)
    first: dict[Any, str] = {}
    return {axis: first.setdefault(symbol, axis) for axis, symbol in symbols.items()}


def _traced(
    name: str,
    function: Callable[..., Any],
    variant: Variant,
    any_size: bool,
    hints: Mapping[str, int] | None = None,
) -> tuple[Graph, dict[str, Any], list[Node]]:
    from torch._inductor.decomposition import select_decomp_table

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    axes = dict.fromkeys(a for p in variant.parameters for a in p.axes if isinstance(a, str))
    if len(axes) > len(HINTS) and not hints:
        raise PatternError(f"{name}: more than {len(HINTS)} named axes")
    known = hints or dict(zip(axes, HINTS, strict=False))
    sizes = {axis: _symbol(env, axis, known[axis]) for axis in axes}
    order = [p for p in variant.parameters if p.kind != "program"]
    with mode:
        examples = [_example(p, sizes) for p in order]

    def body(*values: Any) -> Any:
        given = dict(variant.fixed)
        given |= {p.name: functools.partial(_program, p.name) for p in variant.parameters if p.kind == "program"}
        given |= {p.name: x for p, x in zip(order, values, strict=True)}
        return function(**given)

    try:
        with mode, torch.no_grad(), _symbolic_roots(), enable_python_dispatcher():
            module = make_fx(body, dict(select_decomp_table()), tracing_mode="real")(*examples)
    except PatternError:
        raise
    except Exception as error:
        raise PatternError(f"{name}: its function cannot be traced: {type(error).__name__}: {error}") from error
    module.graph.eliminate_dead_code()
    for axis, size in sizes.items():
        if any_size and not isinstance(env.replace(size.node.expr), sympy.Symbol):
            raise PatternError(f"{name}: its function fixes the axis {axis} to one size; axes may have any")
    for parameter, node in zip(order, (n for n in module.graph.nodes if n.op == "placeholder"), strict=True):
        if not node.users:
            raise PatternError(f"{name}: {parameter.name} is not used" + _when(variant))
    if any(n.op == "get_attr" for n in module.graph.nodes):
        raise PatternError(f"{name}: it reads a tensor from outside; declare it as a parameter")
    symbols = {axis: size.node.expr for axis, size in sizes.items()}
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    named = dict(zip((p.name for p in order), inputs, strict=True))
    _keep(module)
    return module.graph, symbols, [named[p.name] for p in order]


def _when(variant: Variant) -> str:
    return f" when {variant}" if variant.fixed else ""


_modules: list[torch.fx.GraphModule] = []  # a graph lives as long as its module


def _keep(module: torch.fx.GraphModule) -> None:
    _modules.append(module)


def _symbol(env: ShapeEnv, axis: str, hint: int) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"size_{axis}")
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _example(parameter: Parameter, sizes: Mapping[str, Any]) -> Any:
    if parameter.kind == "scalar":
        return torch.empty(())
    return torch.empty([sizes[a] if isinstance(a, str) else a for a in parameter.axes], dtype=parameter.dtype)


@contextlib.contextmanager
def _symbolic_roots() -> Iterator[None]:
    """``math.sqrt`` of a size stays symbolic, as it does in Dynamo."""
    plain = math.sqrt

    def sqrt(x: Any, /) -> Any:
        return torch.sym_sqrt(x) if isinstance(x, (torch.SymInt, torch.SymFloat)) else plain(x)

    math.sqrt = sqrt
    try:
        yield
    finally:
        math.sqrt = plain


def _program(name: str, x: Tensor) -> Tensor:
    """A program hole while a pattern is traced: an operator that nothing knows."""
    out: Tensor = program_op()(x, name)
    return out


def _lifted(
    name: str, graph: Graph, results: Sequence[Node]
) -> tuple[Opener, Lifter, tuple[Term, ...], tuple[Term, ...], tuple[Dims, ...]]:
    """The results as roots to open, as whole terms, and their dimensions."""
    axes = Axes()
    for _ in range(RESTARTS):
        opener, whole = Opener(axes), Lifter(axes, {n for n in graph.nodes if is_call(n)})
        whole.terms = opener.terms
        try:
            dims = tuple(dims_of(axes, r) for r in results)
            roots = tuple(opener.request(r, d) for r, d in zip(results, dims, strict=True))
            for root in roots:
                settle(opener, root)
            whole.hints.update(opener.hints)
            terms = tuple(whole.request(r, d) for r, d in zip(results, dims, strict=True))
            return opener, whole, roots, terms, dims
        except Again:
            continue
        except Refine as refine:
            try:
                axes.split(refine)
            except Irregular as error:
                raise PatternError(f"{name}: it cannot be written in named axes: {error}") from error
        except (Irregular, CannotWindow) as error:
            raise PatternError(f"{name}: it cannot be written in named axes: {error}") from error
    raise PatternError(f"{name}: its axes do not settle")


def _apart(terms: Sequence[Term]) -> frozenset[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for term in (t for whole in terms for t in subterms(whole)):
        names = [a.size for a in term.axes if isinstance(a.size, sympy.Symbol)]
        found |= {s for s in names if names.count(s) > 1}
    return frozenset(found)


def dims_of(axes: Axes, node: Node) -> Dims:
    """Axes for the dimensions of a result."""
    return tuple(axes.dim((node, k), n, "abcdefghij"[k]) for k, n in enumerate(shape_of(value_of(node))))


def settle(opener: Opener, root: Term) -> None:
    """Open all that ``root`` depends on, so that no axis is left to be split."""
    stack, seen = [root], {root}
    while stack:
        term = stack.pop()
        opener.softmax(term)
        top = opener.open(term)
        for arg in top.args:
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)


def head(node: Node) -> Node:
    """The operator that makes a value: layout and casts looked through."""
    while is_call(node) and (opname(node) in LAYOUT or opname(node) in CASTS):
        node = node.args[0]  # type: ignore[assignment]
    return node


def kind_of(node: Node) -> str:
    """The kind of an operator, the same for its spellings."""
    name = opname(node)
    if name in CONTRACTIONS:
        return "contraction"
    if name in ("mul", "div"):
        return "product"
    if name in ("add", "sub", "rsub"):
        return "sum"
    return "softmax" if "softmax" in name else name


@functools.lru_cache(maxsize=512)
def lifted_variant(pattern: Pattern, index: int) -> LiftedPattern:
    """A variant of a pattern, traced once."""
    with clean_room():
        return lifted(pattern.name, pattern.function, pattern.variants[index], any_size=not pattern.names_sites)


def lifted_variants(pattern: Pattern) -> Iterator[LiftedPattern]:
    """All variants of a pattern.  Raises ``PatternError``."""
    for index in range(len(pattern.variants)):
        yield lifted_variant(pattern, index)
