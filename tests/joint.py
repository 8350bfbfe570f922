"""The graph that reaches Inductor's joint pass, and what the engine makes of it, without compiling any further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from sdpa_rewrite import analyse, match
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.site import Miss, Site


class Captured(Exception):
    """Raised to end the compilation: what was wanted has been seen."""


def with_graph(read: Callable[[Graph], Any], function: Callable[..., Any], *args: Any, dynamic: bool = False) -> Any:
    """``read`` of the joint graph (the inference graph, where no argument needs a gradient) of ``function``."""
    found: list[Any] = []

    def note(graph: Graph) -> None:
        found.append(read(graph))
        raise Captured

    torch._dynamo.reset()
    with torch._inductor.config.patch(joint_custom_pre_pass=note):
        try:
            torch.compile(function, backend="inductor", dynamic=dynamic, fullgraph=True)(*args)
        except Exception:
            if not found:
                raise
    return found[0]


def analysed(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> list[Site | Miss]:
    """What becomes of every candidate in ``function``, in graph order."""
    return with_graph(_analyse, function, *args, dynamic=dynamic)  # type: ignore[no-any-return]


def _analyse(graph: Graph) -> list[Site | Miss]:
    order = {node: k for k, node in enumerate(graph.nodes)}
    found: list[Site | Miss] = []
    for candidate in match.candidates(graph):
        try:
            with clean_room():
                found.append(analyse.certified(candidate, order))
        except Miss as miss:
            found.append(miss)
    return found


def the_site(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> Site:
    """The one attention of ``function``."""
    (found,) = analysed(function, *args, dynamic=dynamic)
    assert isinstance(found, Site), found
    return found


def the_miss(function: Callable[..., Any], *args: Any) -> Miss:
    """Why the one candidate of ``function`` is none."""
    (found,) = analysed(function, *args)
    assert isinstance(found, Miss), f"recognised: {found}"
    return found


def tensors(*shape: int, count: int = 3, grad: bool = False, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random tensors of one shape."""
    return [torch.randn(shape or (2, 3, 8, 4), dtype=dtype, requires_grad=grad) for _ in range(count)]
