"""Near misses of a pattern, made of its own trace: one operator changed, dropped, moved or read by somebody else."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from sdpa_rewrite.authoring.hole import program_op
from sdpa_rewrite.authoring.lifted import LiftedPattern
from sdpa_rewrite.lift.ops import CONTRACTIONS, REDUCTIONS, is_call, is_pointwise, is_tensor, opname, value_of

aten = torch.ops.aten
SWAPS: dict[Any, Any] = {
    aten.add.Tensor: aten.sub.Tensor,
    aten.sub.Tensor: aten.add.Tensor,
    aten.mul.Tensor: aten.add.Tensor,
    aten.sigmoid.default: aten.tanh.default,
    aten.tanh.default: aten.sigmoid.default,
    aten.exp.default: aten.sigmoid.default,
}
Change: TypeAlias = Callable[[Graph, Node], None]

LARGEST = 1e4  # beyond it a program tells rounding errors, not forms


@dataclass(frozen=True)
class Mutant:
    """A program that differs from a pattern in one place."""

    what: str
    function: _Program

    def is_sane(self, inputs: Mapping[str, Any]) -> bool:
        """Whether it runs on ``inputs``, and stays among numbers of a usual size."""
        try:
            return self.function.largest(**inputs) < LARGEST
        except Exception:
            return False  # not a program on these shapes


def mutants(pattern: LiftedPattern, seed: int = 0) -> Iterator[Mutant]:
    """Programs that differ from a pattern in one place, drawn evenly from all kinds of change; some are equivalent."""
    kinds: list[list[tuple[str, Change, Node]]] = [
        [(f"{text} {node.name}", change, node) for node in pattern.graph.nodes if applies(node)]
        for text, applies, change in KINDS
    ]
    draw = random.Random(seed)
    for kind in kinds:
        draw.shuffle(kind)
    while any(kinds):
        for what, change, node in [kind.pop() for kind in kinds if kind]:
            yield Mutant(what, _changed(pattern, node, change))


def _changed(pattern: LiftedPattern, node: Node, change: Change) -> _Program:
    graph = Graph()
    copies: dict[Node, Node] = {}
    out = graph.graph_copy(pattern.graph, copies)
    graph.output(out)
    for old, new in copies.items():
        new.meta = copy.copy(old.meta)
    change(graph, copies[node])
    graph.eliminate_dead_code()
    graph.lint()
    return _Program(graph, pattern)


class _Program:
    """A graph as a function of the pattern's parameters by name."""

    def __init__(self, graph: Graph, pattern: LiftedPattern) -> None:
        self._names = [p.name for p in pattern.parameters.values()]
        self._given: Mapping[str, Any] = {}
        for node in graph.nodes:
            if node.target is program_op():
                node.target = self._apply
            elif node.target is torch.ops.prims.convert_element_type.default:
                node.target = _cast
        self._module = GraphModule(torch.nn.Module(), graph)

    def _apply(self, x: Tensor, name: str) -> Any:
        return self._given[name](x)

    def __call__(self, **values: Any) -> Any:
        self._given = values
        return self._module(*(values[n] for n in self._names))

    def largest(self, **values: Any) -> float:
        """The largest magnitude of all that is computed on the way."""
        self._given = values
        watch = _Watch(self._module)
        watch.run(*(values[n] for n in self._names))
        return watch.largest


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast of the trace, which knows no derivative; float64 is what others are compared with, and stays exact."""
    exact = x.dtype == torch.float64 and dtype.is_floating_point
    return x if exact else x.to(dtype)


class _Watch(Interpreter):
    largest = 0.0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            finite = value.detach().abs().nan_to_num(posinf=0.0)
            self.largest = max(self.largest, float(finite.max()))
        return value


def _rescale(graph: Graph, node: Node) -> None:
    """Multiply a value by a number near one."""
    with graph.inserting_after(node):
        new = graph.call_function(aten.mul.Tensor, (node, 1.25))
    _take_over(node, new)


def _negate(graph: Graph, node: Node) -> None:
    with graph.inserting_after(node):
        new = graph.call_function(aten.neg.default, (node,))
    _take_over(node, new)


def _shift(graph: Graph, node: Node) -> None:
    """Add a value per row or column: not what softmax cancels."""
    with graph.inserting_after(node):
        new = graph.call_function(aten.add.Tensor, (node, node))
    _take_over(node, new)


def _detach(graph: Graph, node: Node) -> None:
    """Let no gradient pass."""
    with graph.inserting_after(node):
        new = graph.call_function(aten.detach.default, (node,))
    _take_over(node, new)


def _drop(graph: Graph, node: Node) -> None:
    """Leave a pointwise operator out."""
    same = next(n for n in node.all_input_nodes if is_tensor(n) and value_of(n).shape == value_of(node).shape)
    node.replace_all_uses_with(same)


def _swap(graph: Graph, node: Node) -> None:
    """Another operator of the same arguments."""
    node.target = SWAPS[node.target]


def _number(graph: Graph, node: Node) -> None:
    """Another number."""
    args = [1.5 * a if isinstance(a, float) else a for a in node.args]
    node.args = tuple(args)


def _user(graph: Graph, node: Node) -> None:
    """Another result: a value that was the pattern's own."""
    output = next(n for n in graph.nodes if n.op == "output")
    held = output.args[0]
    results = list(held) if isinstance(held, (tuple, list)) else [held]
    with graph.inserting_before(output):
        extra = graph.call_function(aten.clone.default, (node,))
    output.args = ((*results, extra),)


def _axis(graph: Graph, node: Node) -> None:
    """A reduction over another axis."""
    dims: Any = node.args[1]
    rank = value_of(node.args[0]).dim()
    over = dims if isinstance(dims, (list, tuple)) else [dims]
    node.args = (node.args[0], [(d - 1) % rank for d in over], *node.args[2:])


def _turn(graph: Graph, node: Node) -> None:
    """The columns in reverse."""
    with graph.inserting_after(node):
        new = graph.call_function(aten.flip.default, (node, [-1]))
    _take_over(node, new)


def _roll(graph: Graph, node: Node) -> None:
    """Each row takes the place of the next."""
    with graph.inserting_after(node):
        new = graph.call_function(aten.roll.default, (node, [1], [-2]))
    _take_over(node, new)


def _take_over(node: Node, new: Node) -> None:
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _interior(node: Node) -> bool:
    """A value that the pattern computes and goes on with."""
    return (
        is_call(node)
        and is_tensor(node)
        and value_of(node).dtype.is_floating_point
        and any(u.op != "output" for u in node.users)
    )


def _computed(node: Node) -> bool:
    return _interior(node) and (is_pointwise(node) or opname(node) in CONTRACTIONS)


def _droppable(node: Node) -> bool:
    inputs = [n for n in node.all_input_nodes if is_tensor(n)]
    return _computed(node) and is_pointwise(node) and any(value_of(n).shape == value_of(node).shape for n in inputs)


def _numbered(node: Node) -> bool:
    return is_call(node) and any(isinstance(a, float) and a not in (0.0,) and abs(a) < 1e30 for a in node.args)


def _reduces(node: Node) -> bool:
    return is_call(node) and opname(node) in REDUCTIONS and len(node.args) > 2 and node.args[2] is True


KINDS: list[tuple[str, Callable[[Node], bool], Change]] = [
    ("rescale", _computed, _rescale),
    ("leave out", _droppable, _drop),
    ("also return", _computed, _user),
    ("another operator for", lambda n: is_call(n) and n.target in SWAPS, _swap),
    ("detach", _computed, _detach),
    ("another number in", _numbered, _number),
    ("another axis for", _reduces, _axis),
    ("negate", _computed, _negate),
    ("reverse", _computed, _turn),
    ("roll", lambda n: _computed(n) and value_of(n).dim() > 1, _roll),
    ("double", _computed, _shift),
]
