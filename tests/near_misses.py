"""Programs of ``tests.programs`` with one thing changed that makes them something else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests import programs
from tests.harness import Verdict, judge_function
from tests.programs import Program, Tensors

Change = Callable[[Tensor], Any]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.5


def _own_gradient(x: Tensor) -> Tensor:
    return _Scaled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def _half_detached(x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * x.detach()


def _rolled(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def _flipped(x: Tensor) -> Tensor:
    return x.flip(-2)


def _sorted(x: Tensor) -> Tensor:
    return x.sort(-1).values


def _top(x: Tensor) -> Tensor:
    return x.masked_fill(x < x.mean(-1, keepdim=True), -torch.inf)


def _smoothed(x: Tensor) -> Tensor:
    return x + 0.1 * x.mean(-2, keepdim=True)


def _cumulated(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def _squared(x: Tensor) -> Tensor:
    return x * x


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-2, keepdim=True)


def _renormalised(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 0.1)


def _thresholded(x: Tensor) -> Tensor:
    return torch.where(x > 0.1, x, 0.0)


# where it happens, and what
NEAR_MISSES: dict[str, tuple[str, Change]] = {
    "scores with a gradient of their own": ("scores", _own_gradient),
    "scores half detached": ("scores", _half_detached),
    "scores rolled": ("scores", _rolled),
    "scores flipped": ("scores", _flipped),
    "scores sorted": ("scores", _sorted),
    "scores above their mean": ("scores", _top),
    "scores smoothed over the queries": ("scores", _smoothed),
    "scores cumulated": ("scores", _cumulated),
    "scores squared": ("scores", _squared),
    "scores centred over the queries": ("scores", _centred),
    "probabilities with a gradient of their own": ("probabilities", _own_gradient),
    "probabilities half detached": ("probabilities", _half_detached),
    "probabilities rolled": ("probabilities", _rolled),
    "probabilities smoothed over the queries": ("probabilities", _smoothed),
    "probabilities cumulated": ("probabilities", _cumulated),
    "probabilities squared": ("probabilities", _squared),
    "probabilities renormalised": ("probabilities", _renormalised),
    "probabilities above a threshold": ("probabilities", _thresholded),
}
# only the gradients tell these apart, and not all of them: where they are the same, fusing is right
SAME_OUTPUT = frozenset(
    {
        "scores with a gradient of their own",
        "scores half detached",
        "probabilities with a gradient of their own",
        "probabilities half detached",
    }
)
# functions of one score or one probability: an emitter for any program may take them, as what they are
POINTWISE = frozenset({"scores squared", "probabilities squared", "probabilities above a threshold"})


def judge_near_miss(program: Program, name: str) -> Verdict:
    """Compile ``program`` with the change: the same as eager, and not fused as if nothing had changed."""
    place, change = NEAR_MISSES[name]
    plain = {"weight": "none"} if program.weight == "dropout" else {}
    plain |= {"scale": "mul"} if program.scale == "zero" else {}  # scores that are all equal
    program = replace(program, **plain)  # type: ignore[arg-type]

    def run(x: Tensors, wide: torch.dtype = torch.float32) -> Tensor:
        return programs.run(program, x, wide, **{place: change})

    verdict = judge_function(program, run, functools.partial(run, wide=torch.float64))
    small = 1 in program.shape or 0 in program.shape  # one key or query: many changes change nothing
    as_it_is = all(o.emitter != "sdpa" for o in verdict.outcomes) and name in POINTWISE
    if verdict.status == "fused" and not verdict.wrong and not small and not as_it_is and name not in SAME_OUTPUT:
        verdict.wrong = "fused although it is something else"
    return verdict
