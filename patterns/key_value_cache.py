"""Key-value cache: the keys and values so far, and the new ones after them.

Found in: ``DynamicCache.update`` (transformers), nanoGPT forks, every decoder in generation.  Where the scores are
concatenated and the probabilities split instead, the engine says so.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Query

Past = Annotated[Tensor, "b h p d"]
PastValues = Annotated[Tensor, "b h p e"]
New = Annotated[Tensor, "b h n d"]
NewValues = Annotated[Tensor, "b h n e"]


@named_form
def key_value_cache(q: Query, past: Past, new: New, past_v: PastValues, new_v: NewValues, scale: Scalar) -> Tensor:
    """Attention over concatenated keys."""
    k, v = torch.cat([past, new], 2), torch.cat([past_v, new_v], 2)
    return ((q @ k.mT) * scale).softmax(-1) @ v


@key_value_cache.near_miss("a softmax for each part")
def _apart(q: Tensor, past: Tensor, new: Tensor, past_v: Tensor, new_v: Tensor, scale: float) -> Tensor:
    parts = [((q @ k.mT) * scale).softmax(-1) @ v for k, v in ((past, past_v), (new, new_v))]
    return parts[0] * 0.5 + parts[1] * 0.5
