"""A pattern's own trace: what its function computes, as a graph over its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.axes import Dims, Irregular, Refine, shape_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.authoring.hole import program_op
from sdpa_rewrite.authoring.opener import Again, Opener
from sdpa_rewrite.authoring.parameters import Parameter, PatternError, Variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.authoring.trace import output_of, traced
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.lift.lifter import Axes, CannotWindow, Lifter
from sdpa_rewrite.lift.ops import CASTS, CONTRACTIONS, LAYOUT, is_call, is_tensor, opname, source_line, value_of

RESTARTS = 32
HIDDEN = frozenset({"product", "sum", "program"})  # kinds that another spelling may not show


@dataclass(frozen=True, eq=False)
class LiftedPattern:
    """One variant of a pattern as a graph.

    ``symbols``: the size of each named axis.  ``parameters``: by placeholder.  ``results``: those that are computed,
    and ``kept``: their places among all that is returned.  ``roots``: the results, layout looked through; ``terms`` the
    same as a whole, and ``dims`` their dimensions.  ``program_dims``: the dimensions of what
    each program is a function of.  ``apart``: names that stand for several axes at once (a square).
    """

    name: str
    function: Callable[..., Any]
    variant: Variant
    graph: Graph
    symbols: Mapping[str, sympy.Symbol]
    parameters: Mapping[Node, Parameter]
    results: tuple[Node, ...]
    kept: tuple[int, ...]
    opener: Opener
    roots: tuple[Term, ...]
    terms: tuple[Term, ...]
    dims: tuple[Dims, ...]
    program_dims: Mapping[str, Dims]
    apart: frozenset[sympy.Symbol]

    def line(self, node: Node) -> str:
        """The line of the pattern that made ``node``, or that reads it, if it is a parameter."""
        made = node if is_call(node) else next(iter(node.users))
        return source_line(made)

    @functools.cached_property
    def kind(self) -> str:
        """The kind of the first result."""
        return kind_of(head(self.results[0]))

    @functools.cached_property
    def needed(self) -> frozenset[str]:
        """Kinds of operators that are to be seen below a result, in whatever spelling."""
        return kinds_below(head(self.results[0])) - HIDDEN

    def placeholder(self, name: str) -> Node:
        """The node of a parameter."""
        return next(n for n, p in self.parameters.items() if p.name == name)


def lifted(name: str, function: Callable[..., Any], variant: Variant, any_size: bool = True) -> LiftedPattern:
    """Trace and lift one variant; ``any_size``: its axes must stay symbolic.  Raises ``PatternError``."""
    graph, symbols, placeholders = traced(name, function, variant, any_size)
    declared = [p for p in variant.parameters if p.kind != "program"]
    parameters = dict(zip(placeholders, declared, strict=True))
    results, kept = _results(name, graph)
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
        kept,
        opener,
        roots,
        terms,
        dims,
        programs,
        _apart(terms),
    )


def _results(name: str, graph: Graph) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The results, and their places among all that the function returns.

    A parameter that is returned, perhaps in another layout, is as it was: there is nothing to replace.
    """
    returned = pytree.tree_leaves(output_of(graph))
    for value in returned:
        if not isinstance(value, Node) or not isinstance(value_of(value), Tensor):
            raise PatternError(f"{name}: a pattern returns tensors, not {value!r}")
    kept = tuple(k for k, value in enumerate(returned) if is_call(head(value)))
    if not kept:
        raise PatternError(f"{name}: it computes nothing: its result is a parameter as it is")
    return tuple(returned[k] for k in kept), kept


def _lifted(
    name: str, graph: Graph, results: Sequence[Node]
) -> tuple[Opener, Lifter, tuple[Term, ...], tuple[Term, ...], tuple[Dims, ...]]:
    """The results as roots to open, as whole terms, and their dimensions."""
    opener = Opener(Axes())
    for _ in range(RESTARTS):
        axes, whole = opener.axes, Lifter(opener.axes, {n for n in graph.nodes if is_call(n)})
        whole.terms = opener.terms
        try:
            dims = tuple(dims_of(axes, r) for r in results)
            roots = tuple(opener.request(r, d) for r, d in zip(results, dims, strict=True))
            for root in roots:
                settle(opener, root)
            whole.hints.update(opener.hints)
            terms = tuple(whole.request(r, d) for r, d in zip(results, dims, strict=True))
            return opener, whole, roots, terms, dims
        except (Again, Refine) as found:
            try:
                opener = found.opener if isinstance(found, Again) else opener.after(found)
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


def kinds_below(node: Node, depth: int = 3) -> frozenset[str]:
    """The kinds of what an operator reads, products and sums looked through.

    A softmax is of the kind of what it may be spelled with; behind a long product there may be one.
    """
    found: set[str] = set()
    for source in node.all_input_nodes:
        below = head(source)
        if not is_call(below) or not is_tensor(below):
            continue
        kind = kind_of(below)
        found.add("exp" if kind == "softmax" else kind)
        if kind in ("product", "sum"):
            found |= kinds_below(below, depth - 1) if depth else {"exp"} if kind == "product" else set()
    return frozenset(found)


@functools.lru_cache(maxsize=512)
def lifted_variant(pattern: Pattern, index: int) -> LiftedPattern:
    """A variant of a pattern, traced once."""
    with clean_room():
        return lifted(pattern.name, pattern.function, pattern.variants[index], any_size=not pattern.names_sites)


def lifted_variants(pattern: Pattern) -> Iterator[LiftedPattern]:
    """All variants of a pattern.  Raises ``PatternError``."""
    for index in range(len(pattern.variants)):
        yield lifted_variant(pattern, index)
