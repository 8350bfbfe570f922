"""Safe softmax: a row that is masked as a whole is zero, where softmax gives NaN.

Found in: ``torch.nn.functional.scaled_dot_product_attention``'s own decomposition, JAX's ``where=`` softmax,
``nan_to_num`` after the softmax (x-transformers).
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def safe_softmax(q: Query, k: Key, v: Value, keep: Annotated[Tensor, "b h i j", torch.bool], scale: Scalar) -> Tensor:
    """Rows that are masked as a whole become zero."""
    scores = ((q @ k.mT) * scale).masked_fill(~keep, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, scores.softmax(-1)) @ v


@safe_softmax.near_miss("empty rows become one")
def _ones(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    scores = ((q @ k.mT) * scale).masked_fill(~keep, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(empty, 1.0, scores.softmax(-1)) @ v
