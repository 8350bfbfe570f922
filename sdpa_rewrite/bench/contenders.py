"""The ways to run a case that are measured side by side."""

from __future__ import annotations

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


class Unavailable(Exception):
    """Why a case cannot be run some way."""


@dataclass(frozen=True)
class Step:
    """One run of a function on fixed inputs: forward, and backward where the case trains."""

    function: Callable[..., Tensor]
    inputs: list[Tensor]
    leaves: list[Tensor]
    cotangent: Tensor | None

    def __call__(self) -> tuple[Tensor, ...]:
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

    results: tuple[Tensor, ...]
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


def difference(ours: tuple[Tensor, ...], stock: tuple[Tensor, ...]) -> float:
    """The largest difference of a result, as a share of its largest value; NaN must stand where NaN stands."""
    return max((_apart(a.double(), b.double()) for a, b in zip(ours, stock, strict=True)), default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    numbers = ~b.isnan()
    if not torch.equal(~a.isnan(), numbers):
        return float("inf")
    a, b = a[numbers], b[numbers]
    return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30) if b.numel() else 0.0
