"""Cosine attention: query and key are normalised, and a learned temperature for each head is the scale.

Found in: Swin v2's ``logit_scale``, ViT-22B and OLMo 2 (query and key norms), "Query-Key Normalization" (Henry et al.).
"""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite.authoring import named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def cosine_attention(q: Query, k: Key, v: Value, temperature: Annotated[Tensor, "h"]) -> Tensor:
    """Cosines between query and key, times a temperature for each head."""
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return (cosines * temperature[:, None, None]).softmax(-1) @ v


@cosine_attention.near_miss("the output is normalised")
def _late(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    return F.normalize(((q @ k.mT) * temperature[:, None, None]).softmax(-1) @ v, dim=-1)
