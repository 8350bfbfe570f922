"""Functions compiled without code generation, run forward and backward, and compared with eager."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdpa_rewrite import config, graph_pass

NOISE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.04, torch.float16: 0.006}
ALLOWED = 3.0  # times the error of the function as written


def compiled(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """``fn`` through Dynamo, AOTAutograd and Inductor's passes, ours among them."""
    from sdpa_rewrite.backend import compile_with
    from sdpa_rewrite.explanation import run_in_eager

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_with(gm, example_inputs, {}, {"strict": True}, run_in_eager)

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=dynamic)


def traced(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """``fn`` through AOTAutograd and our pass only: what Inductor's pass would see, in a tenth of the time."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    rewriting = graph_pass.AttentionPass()

    def inference(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        _rewrite(gm)
        return make_boxed_func(gm.forward)

    def _rewrite(gm: torch.fx.GraphModule) -> None:
        with config.patch(strict=True):
            rewriting(gm.graph)
        gm.recompile()

    def partition(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _rewrite(gm)
        return min_cut_rematerialization_partition(gm, inputs, **options)

    def run(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    return aot_function(
        fn,
        fw_compiler=run,
        bw_compiler=run,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(select_decomp_table()),
        dynamic=dynamic,
    )


def in_float64(x: Any) -> Any:
    """A tensor or a module in float64, other values as they are."""
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x).double()
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(torch.float64).requires_grad_(x.requires_grad)
    return x


def run(fn: Callable[..., Any], args: Sequence[Any], seed: int = 0) -> list[Tensor | None]:
    """The results of ``fn`` on copies of ``args``, and the gradients of the args and parameters that require one."""

    def fresh(x: Any) -> Any:
        return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    own = pytree.tree_map(fresh, list(args))
    torch.manual_seed(seed)
    results = [x for x in pytree.tree_leaves(fn(*own)) if isinstance(x, Tensor)]
    learned = list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    wanted = [x for x in (*pytree.tree_leaves(own), *learned) if isinstance(x, Tensor) and x.requires_grad]
    roots = [x for x in results if x.requires_grad]
    values: list[Tensor | None] = [x.detach() for x in results]
    if wanted and roots:
        draw = torch.Generator().manual_seed(1)
        seeds = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in roots]
        values += torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    return values


def exactly(fn: Callable[..., Any], args: Sequence[Any], eager: list[Tensor | None]) -> list[Tensor | None]:
    """What ``run`` gives in float64; ``eager`` where ``fn`` does not run there, as it casts to a type by name."""
    try:
        return run(in_float64(fn), pytree.tree_map(in_float64, list(args)))
    except RuntimeError as error:
        if not re.search("dtype|scalar type", str(error)):
            raise
        return eager


def difference(ours: Sequence[Tensor | None], eager: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> str:
    """Where ``ours`` is worse than ``eager``, measured against float64; empty where it is as good."""
    if len(ours) != len(eager):
        return f"{len(ours)} values instead of {len(eager)}"
    for k, (x, y, z) in enumerate(zip(ours, eager, exact, strict=True)):
        if (x is None) != (y is None):
            return f"value {k}: {'no' if x is None else 'a'} gradient"
        if x is None or y is None or z is None:
            continue
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"value {k}: {x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
        gap, allowed = _gap(x, y, z)
        if gap > allowed:
            return f"value {k}: an error of {gap:.3g} where {allowed:.3g} is allowed"
    return ""


def _gap(ours: Tensor, eager: Tensor, exact: Tensor) -> tuple[float, float]:
    a, b, c = (x.to(torch.float64) for x in (ours, eager, exact))
    odd = (a.isfinite() != b.isfinite()) & (a.isfinite() != c.isfinite())
    if odd.any():
        return math.inf, 0.0
    both = a.isfinite() & b.isfinite() & c.isfinite()
    if not both.any():
        return 0.0, 0.0
    size, error, written = (float(x[both].abs().max()) for x in (c, a - c, b - c))
    noise = NOISE.get(ours.dtype, 0.0)
    return error, ALLOWED * written + noise * (size + 0.1)
