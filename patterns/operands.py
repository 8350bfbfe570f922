"""The operands that the forms of this library share, by their axes.

b batch, h heads, i queries, j keys, d head size of query and key, e head size of the values.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch
from torch import Tensor

Query: TypeAlias = Annotated[Tensor, "b h i d"]
Key: TypeAlias = Annotated[Tensor, "b h j d"]
Value: TypeAlias = Annotated[Tensor, "b h j e"]
KeyMask: TypeAlias = Annotated[Tensor, "b j", torch.bool]


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of queries, as a column, and of keys, as a row."""
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
