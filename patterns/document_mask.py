"""Document mask: a query sees the keys of its own document in a packed sequence.

Found in: packed training (torchtune, FlexAttention's document masking, Llama 3's reports), Swin's shifted windows
(regions of a window that are not neighbours).
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value

Documents = Annotated[Tensor, "b i", torch.int64]
KeyDocuments = Annotated[Tensor, "b j", torch.int64]


@named_form
def document_mask(
    q: Query, k: Key, v: Value, documents: Documents, key_documents: KeyDocuments, scale: Scalar
) -> Tensor:
    """Keys whose document is the query's."""
    same = documents[:, None, :, None] == key_documents[:, None, None, :]
    return ((q @ k.mT) * scale).masked_fill(~same, -math.inf).softmax(-1) @ v


@document_mask.near_miss("the documents are added to the scores")
def _added(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, key_documents: Tensor, scale: float) -> Tensor:
    gap = documents[:, None, :, None] - key_documents[:, None, None, :]
    return ((q @ k.mT) * scale + gap).softmax(-1) @ v
