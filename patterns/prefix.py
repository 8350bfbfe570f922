"""Prefix: every query sees a prefix of the keys, and beyond it those up to its own position.

Found in: PaliGemma (image tokens before text), prefix language models (T5's decoder-only variants, UniLM).
"""

from __future__ import annotations

import math

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value, positions


@named_form
def prefix(q: Query, k: Key, v: Value, scale: Scalar) -> Tensor:
    """The first three keys and those up to the query's position; the number does not matter."""
    i, j = positions(q, k)
    return ((q @ k.mT) * scale).masked_fill(~((j <= i) | (j < 3)), -math.inf).softmax(-1) @ v


@prefix.near_miss("the prefix is seen twice")
def _doubled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    _, j = positions(q, k)
    return ((q @ k.mT) * scale + (j < 3) * 1.0).softmax(-1) @ v
