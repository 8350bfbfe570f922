"""Soft cap: the scores pass through ``cap * tanh(scores / cap)``.

Found in: Gemma 2 (between scale and mask), Grok-1, "Neural Combinatorial Optimization" (tanh clipping).
"""

from __future__ import annotations

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def soft_cap(q: Query, k: Key, v: Value, scale: Scalar) -> Tensor:
    """Scores between -50 and 50; the number does not matter."""
    return (50.0 * ((q @ k.mT) * scale / 50.0).tanh()).softmax(-1) @ v


@soft_cap.near_miss("the cap is on the output")
def _late(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return 50.0 * (((q @ k.mT) * scale).softmax(-1) @ v / 50.0).tanh()
