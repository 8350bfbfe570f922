"""Disentangled attention: content to position and position to content, gathered by distance and added to the scores.

Found in: DeBERTa and DeBERTa-v2's ``disentangled_attention_bias`` (transformers).  The gathered scores are a bias that
is as large as the scores; the products with the positions stay apart.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def disentangled_attention(
    q: Query,
    k: Key,
    v: Value,
    distance: Annotated[Tensor, "h r d"],
    index: Annotated[Tensor, "b h i j", torch.int64],
    scale: Scalar,
) -> Tensor:
    """Scores of the query with the distances, gathered for each key, beside those with the keys."""
    gathered = torch.gather(q @ distance.mT, -1, index)
    return ((q @ k.mT + gathered) * scale).softmax(-1) @ v


@disentangled_attention.near_miss("the scores themselves are gathered")
def _reordered(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, index: Tensor, scale: float) -> Tensor:
    return (torch.gather(q @ k.mT, -1, index) * scale).softmax(-1) @ v
