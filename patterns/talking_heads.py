"""Talking heads: the scores of all heads are mixed before the softmax, the probabilities after it.

Found in: "Talking-Heads Attention" (Shazeer et al.), CaiT's ``proj_l`` and ``proj_w`` (timm).  Every head's softmax
needs the scores of all heads, so no kernel that works head by head computes it.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, pattern
from sdpa_rewrite.patterns.operands import Key, Query

Mix = Annotated[Tensor, "g h"]
Unmix = Annotated[Tensor, "g g"]


@pattern(why_not="talking heads: kernels work head by head, and here a head reads the scores of all")
def talking_heads(
    q: Query, k: Key, v: Annotated[Tensor, "b g j e"], before: Mix, scale: Scalar, after: Unmix | None = None
) -> Tensor:
    """The scores are mixed across heads, and the probabilities too, if ``after`` is there."""
    scores = torch.einsum("bhij,gh->bgij", (q @ k.mT) * scale, before)
    p = scores.softmax(-1)
    return (p if after is None else torch.einsum("bgij,mg->bmij", p, after)) @ v


@talking_heads.near_miss("queries are mixed across heads, which is no mix of the scores")
def _mixed_queries(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, scale: float, after: Tensor | None = None
) -> Tensor:
    q = torch.einsum("bhid,gh->bgid", q, before)
    return ((q @ k[:, : q.shape[1]].mT) * scale).softmax(-1) @ v[:, : q.shape[1]]
