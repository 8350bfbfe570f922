"""ALiBi: a bias that falls off with the distance, by a slope per head.

Found in: BLOOM and MPT (transformers), "Train Short, Test Long" (Press et al.).  The distance is built in the graph
from positions, the slopes are a buffer.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form
from sdpa_rewrite.patterns.operands import Key, Query, Value, positions


@named_form
def alibi(q: Query, k: Key, v: Value, slopes: Annotated[Tensor, "h"], scale: Scalar) -> Tensor:
    """A slope per head times the distance, added to the scores."""
    i, j = positions(q, k)
    return ((q @ k.mT) * scale + slopes[:, None, None] * (j - i)).softmax(-1) @ v


@alibi.near_miss("the slopes multiply the scores")
def _multiplied(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float) -> Tensor:
    return ((q @ k.mT) * scale * slopes[:, None, None]).softmax(-1) @ v
