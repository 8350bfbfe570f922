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


def draw(graph: Graph, node: Node) -> None:
    """Give ``node``, if it is a fused attention, the seeds of random numbers that nothing else reads."""
    if node.target not in (attention, attention_backward):
        return
    for input in Spec.of(node.args[5]).inputs:  # type: ignore[arg-type]
        numbers = node.args[3][input.at] if input.kind == "uniform" else None  # type: ignore[index]
        if isinstance(numbers, Node) and numbers.meta["val"].dim() and all(map(_is_fused, numbers.users)):
            _seeded(graph, numbers)


def _is_fused(node: Node) -> bool:
    return node.target in (attention, attention_backward)


def _seeded(graph: Graph, numbers: Node) -> None:
    from torch._inductor import inductor_prims

    value: Any = numbers.meta["val"]
    with graph.inserting_before(numbers):
        new = graph.call_function(inductor_prims.seed, (value.device,))
    mode = torch._guards.detect_fake_mode(value)
    assert mode is not None
    with mode:
        new.meta["val"] = torch.empty((), dtype=torch.int64, device=value.device)
    numbers.replace_all_uses_with(new)
    graph.erase_node(numbers)
