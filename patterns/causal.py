"""Causal attention: a query sees the keys up to its own position.

Found in: every decoder; nanoGPT's model.py, GPT-2 and Llama (transformers, eager).  Spelled with ``tril`` or ``triu``,
a buffer that is compared with zero, positions, ``masked_fill``, ``where`` or an added mask of -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value, positions


@named_form
def causal(q: Query, k: Key, v: Value, scale: Scalar) -> Tensor:
    """Keys up to the query's position."""
    i, j = positions(q, k)
    return ((q @ k.mT) * scale).masked_fill(j > i, -math.inf).softmax(-1) @ v


@causal.near_miss("the mask comes after the softmax")
def _after(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.tril(((q @ k.mT) * scale).softmax(-1)) @ v


@causal.near_miss("the mask looks ahead")
def _ahead(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    i, j = positions(q, k)
    return ((q @ k.mT) * scale).masked_fill(j < i, -1e9).softmax(-1) @ v
