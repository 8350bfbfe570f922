"""Relative shift: scores of the query with all distances, shifted so that each row starts at its own.

Found in: Transformer-XL's ``_rel_shift``, XLNet's ``rel_shift``, the Music Transformer's skewing, Conformer.  The shift
pads a column, views the padded rows in another length and drops the first: a bias, made apart.
"""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def relative_shift(
    q: Query, k: Key, v: Value, distance: Annotated[Tensor, "h j d"], content: Annotated[Tensor, "h d"], scale: Scalar
) -> Tensor:
    """Content scores with a bias of their own, and distance scores, shifted."""
    scores = q @ distance.mT
    b, h, i, j = scores.shape
    shifted = F.pad(scores, (1, 0)).view(b, h, j + 1, i)[:, :, 1:].reshape(b, h, i, j)
    return (((q + content[:, None, :]) @ k.mT + shifted) * scale).softmax(-1) @ v


@relative_shift.near_miss("the shifted scores are the content's")
def _of_content(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, content: Tensor, scale: float) -> Tensor:
    scores = (q + content[:, None, :]) @ k.mT
    b, h, i, j = scores.shape
    shifted = F.pad(scores, (1, 0)).view(b, h, j + 1, i)[:, :, 1:].reshape(b, h, i, j)
    return (shifted * scale).softmax(-1) @ v
