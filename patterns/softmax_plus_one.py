"""Softmax plus one: the denominator has a one more, so that a head may attend to nothing.

Found in: "Attention Is Off By One" (Miller), ``add_zero_attn`` of ``torch.nn.MultiheadAttention``.
"""

from __future__ import annotations

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def softmax_plus_one(q: Query, k: Key, v: Value, scale: Scalar) -> Tensor:
    """exp(s) / (1 + sum(exp(s)))"""
    e = ((q @ k.mT) * scale).exp()
    return e / (1.0 + e.sum(-1, keepdim=True)) @ v


@softmax_plus_one.near_miss("the one is added to the probabilities")
def _added(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return (1.0 + ((q @ k.mT) * scale).softmax(-1)) @ v
