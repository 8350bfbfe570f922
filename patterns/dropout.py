"""Dropout on the probabilities, in training.

Found in: nearly every model that is trained: ``F.dropout(softmax(...), p, training)``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def dropout(q: Query, k: Key, v: Value, scale: Scalar) -> Tensor:
    """A tenth of the probabilities dropped; the number does not matter."""
    return F.dropout(((q @ k.mT) * scale).softmax(-1), 0.1) @ v


@dropout.near_miss("dropout on the output")
def _late(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.dropout(((q @ k.mT) * scale).softmax(-1) @ v, 0.1)
