"""Sigmoid attention: each key has a weight of its own, and nothing is normalised.

Found in: "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (Ramapuram et al.; its code is
apple/ml-sigmoid-attention), with a bias of ``-log(n)``.  FlashSigmoid is a CUDA library of its own; no
kernel here takes it.
"""

from __future__ import annotations

from torch import Tensor

from sdpa_rewrite.authoring import Program, pattern
from sdpa_rewrite.patterns.operands import Key, Query, Value


@pattern(why_not="sigmoid attention: no kernel here computes attention without a softmax")
def sigmoid_attention(q: Query, k: Key, v: Value, score: Program) -> Tensor:
    """A sigmoid in place of the softmax."""
    return score(q @ k.mT).sigmoid() @ v


@sigmoid_attention.near_miss("normalised after all")
def _normalised(q: Tensor, k: Tensor, v: Tensor, score: Program) -> Tensor:
    p = score(q @ k.mT).sigmoid()
    return p / p.sum(-1, keepdim=True) @ v
