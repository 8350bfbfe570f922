"""Dropout without its random numbers: a kernel that can draw them is given the seed in their place.

Inductor turns each ``rand`` of a graph into numbers of a counter-based generator, whose seed is the next of those that
are drawn together at the start.  The seed is taken where the ``rand`` stood, so that it is the same one, and so are
those of all other random operators of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from sdpa_rewrite.kernels.op import attention, attention_backward
from sdpa_rewrite.kernels.spec import Spec
from sdpa_rewrite.lift.ops import is_call, opname


def draw(graph: Graph, node: Node) -> None:
    """Give ``node``, if it is a fused attention, the seeds of random numbers that nothing else reads."""
    if not _is_fused(node):
        return
    for input in Spec.of(node.args[5]).inputs:  # type: ignore[arg-type]
        numbers = node.args[3][input.at] if input.kind == "uniform" else None  # type: ignore[index]
        if isinstance(numbers, Node) and numbers.meta["val"].dim():
            names = _aliases(_origin(numbers))
            if all(user in names or _is_fused(user) for name in names for user in name.users):
                _seeded(graph, names)


def _is_fused(node: Node) -> bool:
    return node.target in (attention, attention_backward)


def _is_alias(node: Node) -> bool:
    return is_call(node) and opname(node) in ("alias", "detach")


def _origin(node: Node) -> Node:
    return _origin(node.all_input_nodes[0]) if _is_alias(node) else node


def _aliases(node: Node) -> list[Node]:
    """``node`` and what are only other names for it, each after what it names."""
    return [node, *(name for user in node.users if _is_alias(user) for name in _aliases(user))]


def _seeded(graph: Graph, names: list[Node]) -> None:
    from torch._inductor import inductor_prims

    numbers = names[0]
    value: Any = numbers.meta["val"]
    with graph.inserting_before(numbers):
        new = graph.call_function(inductor_prims.seed, (value.device,))
    mode = torch._guards.detect_fake_mode(value)
    assert mode is not None
    with mode:
        new.meta["val"] = torch.empty((), dtype=torch.int64, device=value.device)
    for name in reversed(names):
        name.replace_all_uses_with(new)
        graph.erase_node(name)
