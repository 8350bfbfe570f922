"""Sliding window: a query sees the last keys up to its own position.

Found in: Mistral, Gemma 2 and 3 (every other layer), Longformer.  The window is a number of the model's configuration.
"""

from __future__ import annotations

import math

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value, positions


@named_form
def sliding_window(q: Query, k: Key, v: Value, scale: Scalar) -> Tensor:
    """The last three keys up to the query's position; the number does not matter."""
    i, j = positions(q, k)
    return ((q @ k.mT) * scale).masked_fill((j > i) | (j <= i - 3), -math.inf).softmax(-1) @ v


@sliding_window.near_miss("what is outside the window is zero, not masked")
def _zeroed(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    i, j = positions(q, k)
    return ((q @ k.mT) * scale).masked_fill((j > i) | (j <= i - 3), 0.0).softmax(-1) @ v
