"""The ways to run a case that are measured side by side."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa_rewrite import report
from sdpa_rewrite.bench.case import Case

NAMES = {
    "eager": "as written, without torch.compile",
    "stock": "torch.compile of it",
    "sdpa": "F.scaled_dot_product_attention called by hand (a model with it: under torch.compile)",
    "flex": "compiled FlexAttention, its mask of blocks made before (on CPU for inference only)",
    "ours": 'torch.compile(backend="sdpa_rewrite") of it as written (suite calls: of the call)',
}


Results = tuple[Tensor, ...]

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""Of results of ours and right ones, as a share of the largest value: beyond it something is wrong, not rounded."""


class Unavailable(Exception):
    """Why a case cannot be run some way."""


@dataclass(frozen=True)
class Step:
    """One run of a function on fixed inputs: forward, and backward where the case trains."""

    function: Callable[..., Tensor]
    inputs: list[Tensor]
    leaves: list[Tensor]
    cotangent: Tensor | None

    def __call__(self) -> Results:
        """The output, and the gradients."""
        out = self.function(*self.inputs)
        if self.cotangent is None:
            return (out,)
        return out, *torch.autograd.grad(out, self.leaves, self.cotangent)


def step(name: str, case: Case, inputs: list[Tensor], cotangent: Tensor | None) -> Step:
    """The case run as ``name`` says; raises ``Unavailable``."""
    function, leaves_of = _function(name, case, inputs)
    return Step(function, inputs, case.leaves(leaves_of, inputs) if case.training else [], cotangent)


def _function(name: str, case: Case, inputs: list[Tensor]) -> tuple[Callable[..., Tensor], Any]:
    """What is called, and the function whose parameters it trains."""
    if name == "eager":
        return case.written, case.written
    if name == "stock":
        return _compiled(case.written, "inductor"), case.written
    if name == "ours":
        given = {"written": case.written, "sdpa": case.sdpa, "flex": case.flex and case.flex(*inputs)}[case.ours]
        return _compiled(given, "sdpa_rewrite"), given
    if name == "sdpa":
        if case.sdpa is None:
            raise Unavailable("no such call")
        return _compiled(case.sdpa, "inductor") if case.compile_sdpa else case.sdpa, case.sdpa
    if case.flex is None:
        raise Unavailable("not written with it")
    if case.training:
        raise Unavailable("inference only on CPU")
    return _compiled(case.flex(*inputs), "inductor"), None


def _compiled(function: Any, backend: str) -> Any:
    return torch.compile(function, backend=backend, dynamic=False)


@dataclass(frozen=True)
class FirstRun:
    """The results, what took the attention sites, and why sites were left."""

    results: Results
    kernel: str
    reasons: tuple[str, ...]


def first_run(step: Step) -> FirstRun:
    """Compile and run, from a fixed seed."""
    torch.manual_seed(0)
    with report.collect() as collected, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = step()
    took = dict.fromkeys(o.emitter if o.status == "fused" else "stock" for o in collected.sites)
    left = dict.fromkeys(str(r) for o in collected.sites if o.status != "fused" for r in o.reasons)
    return FirstRun(results, ", ".join(took) or "no site", (*left, *collected.failures))


def exact(case: Case, inputs: list[Tensor], cotangent: Tensor | None) -> Results:
    """The results of the case as written, in float64 from the same inputs, without torch.compile."""
    written = copy.deepcopy(case.written).double() if isinstance(case.written, torch.nn.Module) else case.written
    doubles = [_double(x) for x in inputs]
    leaves = case.leaves(written, doubles) if case.training else []
    return Step(written, doubles, leaves, None if cotangent is None else cotangent.double())()


def _double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def wrong_by(ours: Results, stock: Results, exact: Callable[[], Results], dtype: str) -> float:
    """How far ours is from stock, or from ``exact`` where the two are too far apart to tell which is wrong.

    Stock rounds the scores to the type, which logits far apart do not forgive.
    """
    apart = difference(ours, stock)
    return apart if apart <= LARGEST_DIFFERENCE[dtype] else min(apart, difference(ours, exact()))


def difference(ours: Results, right: Results) -> float:
    """The largest difference of a result, as a share of its largest value; NaN must stand where NaN stands."""
    return max((_apart(a.double(), b.double()) for a, b in zip(ours, right, strict=True)), default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    numbers = ~b.isnan()
    if not torch.equal(~a.isnan(), numbers):
        return float("inf")
    a, b = a[numbers], b[numbers]
    return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30) if b.numel() else 0.0
