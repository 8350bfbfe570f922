"""Compile without generating code, and compare with the same program in eager float64."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._pytree import tree_leaves, tree_map

from sdpa_rewrite import report
from sdpa_rewrite.backend import compile_with
from sdpa_rewrite.outcome import Outcome
from tests import programs
from tests.programs import Program, Tensors

ALLOWED = 3.0  # times the error of the program as written
NOISE = {  # of the largest value: what another order of rounding may cost
    torch.float64: 2e-12,
    torch.float32: 4e-6,
    torch.bfloat16: 0.02,
    torch.float16: 0.003,
}
# A program in float64 is its own yardstick.  Beside a mask of -1e9 its logits are rounded to 1e-7 in one order of
# operations and in another, and where the whole row is masked that is what its probabilities are good for.
ROUNDINGS = 4 * torch.finfo(torch.float64).eps
SWALLOWS = 1e15


def run_in_eager(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
    """Stands in for Inductor's code generation: the final graph as it is."""
    return make_boxed_func(gm.forward)


def compiled(
    function: Callable[..., Any],
    dynamic: bool | None = False,
    keep: list[torch.fx.GraphModule] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """``function`` through Dynamo, AOTAutograd and Inductor's passes with ours; ``keep`` gets the final graphs."""

    def inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **rest: Any) -> Any:
        if keep is not None:
            keep.append(gm)
        return run_in_eager(gm, example_inputs, **rest)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_with(gm, example_inputs, {}, {"strict": True, **options}, inner)

    return torch.compile(function, backend=backend, dynamic=dynamic)


@dataclass
class Ran:
    """An output and the gradients by name."""

    output: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def values(self) -> dict[str, Tensor]:
        """All values by name."""
        return {"output": self.output, **{f"gradient of {n}": g for n, g in self.gradients.items()}}


def evaluate(program: Program, function: Callable[[Tensors], Tensor], inputs: Tensors, exact: bool) -> Ran:
    """Run ``function``, forward and backward, on copies of ``inputs``."""
    wanted = programs.leaves(program, inputs)
    own = {}
    for name, x in inputs.items():
        y = x.detach()
        if exact and y.is_floating_point():
            y = y.to(torch.float64)
        own[name] = y.requires_grad_(name in wanted)
    torch.manual_seed(program.seed)
    out = function(own)
    if not wanted or not out.requires_grad:
        return Ran(out.detach())
    g = torch.Generator().manual_seed(program.seed + 1)
    cotangent = torch.randn(out.shape, generator=g, dtype=torch.float64).to(program.dtype).to(out.dtype)
    found = torch.autograd.grad(out, [own[n] for n in wanted], cotangent, allow_unused=True)
    return Ran(out.detach(), {n: x.detach() for n, x in zip(wanted, found, strict=True) if x is not None})


@dataclass
class Verdict:
    """What came of a program: ``status`` is fused, recognised, missed, or invalid where eager itself fails."""

    status: str
    wrong: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    ratio: float = 0.0


def judge(program: Program) -> Verdict:
    """Compile ``program`` and compare it with eager in its own type and in float64."""
    as_written = functools.partial(programs.run, program)
    return judge_function(program, as_written, functools.partial(as_written, wide=torch.float64))


def judge_function(
    program: Program, as_written: Callable[[Tensors], Tensor], in_float64: Callable[[Tensors], Tensor]
) -> Verdict:
    """``judge`` for functions of the tensors of ``program``."""
    inputs = programs.tensors(program)
    random = program.weight == "dropout"
    try:
        eager = evaluate(program, as_written, inputs, exact=False)
        exact = eager if random else evaluate(program, in_float64, inputs, exact=True)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return Verdict("invalid")
    torch._dynamo.reset()
    with report.collect() as collected, torch._inductor.config.patch(fallback_random=random), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = evaluate(program, compiled(as_written, program.dynamic), inputs, exact=False)
        except Exception as error:
            return _failed(program, as_written, inputs, error)
    wrong, ratio = difference(ours, eager, exact, program)
    if wrong and program.autocast and not random:
        wrong, ratio = difference(ours, eager, evaluate(program, in_float64, _cast(inputs), exact=True), program)
    return Verdict(_status(collected.sites), wrong, collected.sites, ratio)


def _cast(inputs: Tensors) -> Tensors:
    """The operands of products as autocast rounds them: that may move a score over the edge of a clamp, which moves a
    gradient by all its size."""
    operands = ("q", "k", "v", "x")
    return {n: x.bfloat16().to(x.dtype) if n in operands and _is_float(x) else x for n, x in inputs.items()}


def _failed(program: Program, function: Callable[[Tensors], Tensor], inputs: Tensors, error: Exception) -> Verdict:
    """The compilation failed: wrong, unless it fails without us too."""
    torch._dynamo.reset()
    try:
        evaluate(
            program, compiled(function, program.dynamic, emitters=(), keep_torch_patterns=False), inputs, exact=False
        )
    except Exception:
        return Verdict("invalid")
    return Verdict("missed", f"raised {type(error).__name__}: {str(error)[:500]}")


def _status(outcomes: Sequence[Outcome]) -> str:
    found = {o.status for o in outcomes}
    return next((s for s in ("fused", "recognised") if s in found), "missed")


def difference(ours: Ran, eager: Ran, exact: Ran, program: Program) -> tuple[str, float]:
    """What is wrong with ``ours``, and the largest error as a part of what is allowed."""
    worst = 0.0
    mine, written, true = ours.values(), eager.values(), exact.values()
    if mine.keys() != written.keys():
        return f"values {sorted(mine)} instead of {sorted(written)}", math.inf
    dtype = torch.bfloat16 if program.autocast else program.dtype
    if dtype == torch.float64 and program.softmax in ("float32", "cast"):
        dtype = torch.float32
    for name, x in mine.items():
        if x.shape != written[name].shape or x.dtype != written[name].dtype:
            return f"{name}: {x.shape} {x.dtype} instead of {written[name].shape} {written[name].dtype}", math.inf
        if name == "output" and not same_strides(x, written[name]):
            return f"{name}: strides {x.stride()} instead of {written[name].stride()}", math.inf
        # a gradient of a scale or a bias is a sum over many positions that may cancel
        base = NOISE[dtype] if dtype != torch.float64 else max(NOISE[dtype], ROUNDINGS * _added(program))
        noise = base * (1 if name.split()[-1] in ("output", "q", "k", "v", "x") else 20)
        text, ratio = compare(x, written[name], true[name], noise)
        worst = max(worst, ratio)
        if text:
            return f"{name}: {text}", ratio
    return "", worst


def _added(program: Program) -> float:
    """The largest finite number that is added to a score and does not swallow it."""
    fill = abs(programs.fill_value(program))
    adds = program.keep != "none" and program.apply in ("add", "multiply") and fill < SWALLOWS
    return max(fill if adds else 0.0, 1e4 if program.bias == "padding" else 0.0)


def same_as_eager(
    function: Callable[..., Any], *args: Any, dynamic: bool | None = False, **options: Any
) -> report.Collected:
    """Compile ``function``; its outputs and the gradients of ``args`` are those of eager.  What the pass told."""
    with report.collect() as collected:
        mine = _with_gradients(compiled(function, dynamic, **options), args)
    written = _with_gradients(function, args)
    random = torch._inductor.config.fallback_random  # another type would draw other numbers
    true = written if random else _with_gradients(function, tree_map(_in_float64, args))
    assert len(mine) == len(written)
    for k, (x, y, z) in enumerate(zip(mine, written, true, strict=True)):
        assert (x is None) == (y is None), f"value {k}: {x} instead of {y}"
        if x is not None and y is not None and z is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype), f"value {k}"
            text, _ = compare(x, y, z, 5 * NOISE[x.dtype] if x.dtype.is_floating_point else 0.0)
            assert not text, f"value {k}: {text}"
    return collected


def _in_float64(x: Any) -> Any:
    return x.detach().to(torch.float64).requires_grad_(x.requires_grad) if _is_float(x) else x


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _with_gradients(function: Callable[..., Any], args: Sequence[Any]) -> list[Tensor | None]:
    """The outputs of ``function``, then the gradients of all that require one, in order."""
    own = tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, args)
    torch.manual_seed(0)
    outputs = [x for x in tree_leaves(function(*own)) if isinstance(x, Tensor)]
    wanted = [x for x in tree_leaves(own) if isinstance(x, Tensor) and x.requires_grad]
    roots = [x for x in outputs if x.requires_grad]
    if not wanted or not roots:
        return [x.detach() for x in outputs]
    g = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=g).to(x.dtype) for x in roots]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)]


def statuses(collected: report.Collected) -> list[str]:
    """What became of each candidate, in order."""
    return [o.status for o in collected.sites]


def reasons(collected: report.Collected) -> str:
    """All reasons, in one text."""
    return "; ".join(str(r) for o in collected.sites for r in o.reasons)


def same_strides(a: Tensor, b: Tensor) -> bool:
    return all(n <= 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)) or not a.numel()


def compare(ours: Tensor, eager: Tensor, exact: Tensor, noise: float) -> tuple[str, float]:
    """Empty when ``ours`` is as good as ``eager``; else what differs.  And the error as a part of what is allowed."""
    a, b, c = (x.to(torch.float64) for x in (ours, eager, exact))
    odd = ~a.isfinite() & ~_same_special(a, b) & ~_same_special(a, c)
    if odd.any():
        return f"{int(odd.sum())} values are not finite that should be", math.inf
    odd = a.isfinite() & ~b.isfinite() & ~c.isfinite()
    if odd.any():
        return f"{int(odd.sum())} values are finite that should not be", math.inf
    both = a.isfinite() & c.isfinite()
    if not both.any():
        return "", 0.0
    size = float(torch.where(c.isfinite(), c, 0.0).abs().max())
    error = float(torch.where(both, a - c, 0.0).abs().max())
    written = float(torch.where(both & b.isfinite(), b - c, 0.0).abs().max())
    allowed = ALLOWED * written + noise * (size + 0.1)
    if error <= allowed:
        return "", error / allowed
    return (
        f"error {error:.3g} where the program as written has {written:.3g} (values up to {size:.3g})",
        error / allowed,
    )


def _same_special(a: Tensor, b: Tensor) -> Tensor:
    return (a.isnan() & b.isnan()) | (a == b)
