"""Relative bias: a learned bias for each head, query and key, with its gradient.

Found in: T5's ``compute_bias`` (buckets of distances, looked up in an embedding), Swin and BEiT's
``relative_position_bias_table``, LeViT's attention biases.  The table is looked up before, and is a tensor here.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def relative_bias(q: Query, k: Key, v: Value, bias: Annotated[Tensor, "h i j"], scale: Scalar) -> Tensor:
    """A bias per head, query and key."""
    return ((q @ k.mT) * scale + bias).softmax(-1) @ v


@relative_bias.near_miss("the bias comes after the softmax")
def _after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    return (((q @ k.mT) * scale).softmax(-1) + bias) @ v
