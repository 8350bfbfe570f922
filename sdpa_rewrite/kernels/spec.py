"""What a call of the fused attention operator means, but for its tensors: data that fits into a string."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

GROUPS = ("batch", "heads", "group", "rows", "columns")
"""The five dimensions of the scores: batch, heads of the keys, query heads for each of those, queries, keys."""


@dataclass(frozen=True)
class Input:
    """What a program reads besides the score.

    ``tensor``: the capture ``at``, which varies along ``axes``.  ``index``: the position along ``axes``, row-major.
    ``uniform``: random numbers, those of a tensor whose dimensions are ``axes``; the capture ``at`` is that tensor, or
    the seed of Inductor's generator (an int64 without dimensions).
    """

    kind: Literal["tensor", "index", "uniform"]
    axes: tuple[int, ...]
    at: int = -1
    dtype: str = "float32"


@dataclass(frozen=True)
class Part:
    """A program (see ``kernels.program``) and the inputs it reads, which follow the score.

    One that goes backward reads the slope of the logit after the score, and returns the slope of the score, then those
    of the inputs ``learned``.
    """

    program: str
    inputs: tuple[int, ...]
    learned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spec:
    """The static part of a call.

    The axes of the scores are numbered; ``split`` says how many make up each of the five dimensions.  ``score`` makes
    a logit of ``scale`` times a score; ``factor`` is what a probability is multiplied by; ``bare`` is ``score`` where
    no mask hides anything, ``visible`` says so for each position: 0 hidden, 2 not masked, 1 anything else.  What is
    hidden has a logit of ``floor`` less about a hundred at most: where a row's largest logit is above ``floor``, its
    probability is zero.  ``low`` and ``high`` are places in ``numbers`` of bounds of column - row outside which
    nothing is visible.  ``order`` is the order of the output's dimensions in memory, ``grad_orders`` those of the
    gradients of query, key and value.  ``learned``: inputs that need a gradient.
    """

    split: tuple[int, ...]
    inputs: tuple[Input, ...] = ()
    score: Part | None = None
    bare: Part | None = None
    factor: Part | None = None
    visible: Part | None = None
    score_backward: Part | None = None
    bare_backward: Part | None = None
    learned: tuple[int, ...] = ()
    scale: float = 1.0
    safe: bool = False
    floor: float = float("-inf")
    low: int | None = None
    high: int | None = None
    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    grad_orders: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 2, 3))
    dtype: str = "float32"

    def text(self) -> str:
        """The spec as the operator takes it."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(text: str) -> Spec:
        """The inverse of ``text``."""
        data: dict[str, Any] = {k: _tuples(v) for k, v in json.loads(text).items()}
        data["inputs"] = tuple(Input(**_named(x)) for x in data["inputs"])
        parts = ("score", "bare", "factor", "visible", "score_backward", "bare_backward")
        data |= {k: Part(**_named(data[k])) for k in parts if data[k] is not None}
        return Spec(**data)

    @property
    def out_dtype(self) -> torch.dtype:
        """The type of the output."""
        return dtype_named(self.dtype)

    def group_of(self, axis: int) -> int:
        """Which of the five dimensions an axis belongs to."""
        at = 0
        for group, count in enumerate(self.split):
            at += count
            if axis < at:
                return group
        raise IndexError(axis)

    def axes_of(self, group: int) -> range:
        """The axes of one of the five dimensions."""
        first = sum(self.split[:group])
        return range(first, first + self.split[group])


def dtype_named(name: str) -> torch.dtype:
    """``float32`` -> ``torch.float32``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _named(data: dict[str, Any]) -> dict[str, Any]:
    return {k: _tuples(v) for k, v in data.items()}


def output_strides(sizes: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Strides of a dense tensor whose dimensions lie in memory in ``order``."""
    strides: list[Any] = [1] * len(sizes)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * sizes[dim]
    return strides
