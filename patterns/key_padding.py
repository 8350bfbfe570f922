"""Key padding: the keys beyond a sequence's length are masked.

Found in: every encoder that takes a batch of sequences; BERT's extended attention mask (transformers), fairseq's
``key_padding_mask``.  As a bool that fills, or as 0 and a huge negative number that is added.
"""

from __future__ import annotations

import math

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, KeyMask, Query, Value


@named_form
def key_padding(q: Query, k: Key, v: Value, keep: KeyMask, scale: Scalar) -> Tensor:
    """The keys that are kept."""
    return ((q @ k.mT) * scale).masked_fill(~keep[:, None, None, :], -math.inf).softmax(-1) @ v


@key_padding.near_miss("the scores of padded keys are zero")
def _zeroed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    return ((q @ k.mT) * scale * keep[:, None, None, :]).softmax(-1) @ v


@key_padding.near_miss("the probabilities of padded keys are zero, and the row no longer sums to one")
def _unnormalised(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    return (((q @ k.mT) * scale).softmax(-1) * keep[:, None, None, :]) @ v
