"""Sink: a learned logit for each head that takes part in the softmax and has no value.

Found in: gpt-oss (``sinks``, concatenated to the scores and dropped after the softmax), "Efficient Streaming Language
Models with Attention Sinks" (Xiao et al.).
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value


@named_form
def sink(q: Query, k: Key, v: Value, sinks: Annotated[Tensor, "h"], scale: Scalar) -> Tensor:
    """One more logit for each head, dropped after the softmax."""
    scores = (q @ k.mT) * scale
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@sink.near_miss("the sink is not dropped from the probabilities, but the last key is")
def _dropped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> Tensor:
    scores = (q @ k.mT) * scale
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)
    return torch.cat([column, scores], -1).softmax(-1)[..., :-1] @ v
