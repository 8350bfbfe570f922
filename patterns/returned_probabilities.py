"""Returned probabilities: an attention whose probabilities are a result, too.

Found in: ``output_attentions=True`` (transformers), ``need_weights`` of ``torch.nn.MultiheadAttention``.  They are as
large as the scores and are made in any case: fusing the output would compute the scores twice and save nothing.
"""

from __future__ import annotations

from torch import Tensor

from sdpa_rewrite.authoring import Program, pattern
from sdpa_rewrite.patterns.operands import Key, Query, Value


@pattern(why_not="the probabilities are returned: they are made in any case, and the scores would be computed twice")
def returned_probabilities(q: Query, k: Key, v: Value, score: Program) -> tuple[Tensor, Tensor]:
    """The output and the probabilities."""
    p = score(q @ k.mT).softmax(-1)
    return p @ v, p


@returned_probabilities.near_miss("the logarithms of the probabilities are returned")
def _logarithms(q: Tensor, k: Tensor, v: Tensor, score: Program) -> tuple[Tensor, Tensor]:
    s = score(q @ k.mT)
    return s.softmax(-1) @ v, s.log_softmax(-1)
