"""Forms of attention, each written out by hand, as a call of torch's operator, and as a call of FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from sdpa_rewrite.bench.case import Function

INFINITY = float("inf")
WINDOW, CAP, DROPOUT, SHARP = 256, 30.0, 0.1, 32.0


@dataclass(frozen=True)
class Size:
    """Batch, heads of queries and of keys, queries, keys, head size."""

    batch: int
    heads: int
    queries: int
    depth: int
    keys: int = 0
    key_heads: int = 0

    @property
    def columns(self) -> int:
        """The number of keys: that of the queries where none is given."""
        return self.keys or self.queries

    @property
    def shared(self) -> int:
        """The number of heads of the keys."""
        return self.key_heads or self.heads

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads else f"{self.heads}"
        rows = f"{self.queries}x{self.keys}" if self.keys else f"{self.queries}"
        return f"{self.batch}x{heads} N={rows} D={self.depth}"


@dataclass(frozen=True)
class Form:
    """``more`` makes what the functions take besides query, key and value; ``seen`` is the share of scores
    that is needed; 0 where it depends on the size.

    ``score_mod`` and ``mask_mod`` make FlexAttention's functions from the query and the further inputs; the mask of
    blocks is made before anything is measured.
    """

    name: str
    written: Function
    sdpa: Function | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    more: Callable[[Size, torch.dtype], list[Tensor]] | None = None
    seen: float = 1.0

    def inputs(self, size: Size, dtype: torch.dtype, training: bool) -> list[Tensor]:
        """Query, key, value and what else the form takes."""
        rows, columns = (size.heads, size.queries), (size.shared, size.columns)
        given = [torch.randn(size.batch, *x, size.depth).to(dtype) for x in (rows, columns, columns)]
        more = self.more(size, dtype) if self.more else []
        return [x.requires_grad_(training) for x in given] + more

    def as_flex(self, *inputs: Tensor) -> Function:
        """A function that calls FlexAttention, to be compiled."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        query, key, _, *more = inputs
        score_mod = self.score_mod(query, *more) if self.score_mod else None
        blocks = None
        if self.mask_mod:
            seen = self.mask_mod(query, *more)
            blocks = create_block_mask(seen, query.shape[0], None, query.shape[2], key.shape[2], device="cpu")
        grouped = query.shape[1] != key.shape[1]

        def call(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            out = flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=grouped)
            assert isinstance(out, Tensor)
            return out

        return call


def scores(q: Tensor, k: Tensor) -> Tensor:
    """The scaled scores."""
    return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))


def behind(q: Tensor, k: Tensor) -> Tensor:
    """How far each key is behind each query, which are the last positions of the keys."""
    n, m = q.size(-2), k.size(-2)
    return torch.arange(n)[:, None] + (m - n) - torch.arange(m)


def slopes(heads: int) -> Tensor:
    """ALiBi's slope of each head."""
    return torch.exp2(-8 * torch.arange(1, heads + 1) / heads)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key or value, its heads repeated."""
    return x.repeat_interleave(heads // x.size(1), dim=1) if x.size(1) != heads else x


# -- written out ---------------------------------------------------------------------------------------------------


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No mask."""
    k, v = repeated(k, q.size(1)), repeated(v, q.size(1))
    return scores(q, k).softmax(-1) @ v


def sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Most weights are below the smallest float, or denormal, which many CPUs are slow at."""
    return (scores(q, k) * SHARP).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees the keys up to its own position."""
    return scores(q, k).masked_fill(behind(q, k) < 0, -INFINITY).softmax(-1) @ v


def causal_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, with dropout on the probabilities."""
    weights = scores(q, k).masked_fill(behind(q, k) < 0, -INFINITY).softmax(-1)
    return dropout(weights, DROPOUT) @ v


def bool_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A tensor says what is seen."""
    return scores(q, k).masked_fill(~mask, -INFINITY).softmax(-1) @ v


def additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A tensor is added."""
    return (scores(q, k) + mask).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees the last keys only."""
    far = behind(q, k)
    return scores(q, k).masked_fill((far < 0) | (far >= WINDOW), -INFINITY).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, and less of what is farther away."""
    far = behind(q, k)
    bias = (-far * slopes(q.size(1))[:, None, None]).to(q.dtype)
    return (scores(q, k) + bias).masked_fill(far < 0, -INFINITY).softmax(-1) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Each query sees its own document."""
    return scores(q, k).masked_fill(ids[:, None] != ids, -INFINITY).softmax(-1) @ v


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, scores bent below a cap."""
    capped = CAP * torch.tanh(scores(q, k) / CAP)
    return capped.masked_fill(behind(q, k) < 0, -INFINITY).softmax(-1) @ v


# -- as calls ------------------------------------------------------------------------------------------------------


def sdpa_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No mask."""
    return scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))


def sdpa_sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No mask, another scale."""
    return scaled_dot_product_attention(q, k, v, scale=SHARP / math.sqrt(q.size(-1)))


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the operator's flag."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the operator's flags."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT)


def sdpa_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The mask is given."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is made."""
    far = behind(q, k)
    return scaled_dot_product_attention(q, k, v, attn_mask=(far >= 0) & (far < WINDOW))


def sdpa_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The bias is made."""
    far = behind(q, k)
    bias = (-far * slopes(q.size(1))[:, None, None]).masked_fill(far < 0, -INFINITY)
    return scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def _is_causal(*_: Tensor) -> Any:
    return lambda b, h, i, j: i >= j


def _in_window(*_: Tensor) -> Any:
    return lambda b, h, i, j: (i >= j) & (i - j < WINDOW)


def _in_mask(query: Tensor, mask: Tensor) -> Any:
    return lambda b, h, i, j: mask[i, j]


def _in_document(query: Tensor, ids: Tensor) -> Any:
    return lambda b, h, i, j: ids[i] == ids[j]


def _in_keys(query: Tensor, mask: Tensor) -> Any:
    return lambda b, h, i, j: mask[b, 0, 0, j]


def _plus_mask(query: Tensor, mask: Tensor) -> Any:
    return lambda score, b, h, i, j: score + mask[i, j]


def _capped(*_: Tensor) -> Any:
    return lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)


def _sharp(*_: Tensor) -> Any:
    return lambda score, b, h, i, j: score * SHARP


def _less_far(query: Tensor) -> Any:
    slope = slopes(query.size(1))
    return lambda score, b, h, i, j: score - slope[h] * (i - j)


# -- further inputs ------------------------------------------------------------------------------------------------


def _lower(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(size.queries, size.columns, dtype=torch.bool).tril()]


def _lower_added(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((size.queries, size.columns), -INFINITY, dtype=dtype).triu(1)]


def _padding(size: Size, dtype: torch.dtype) -> list[Tensor]:
    """Batches of different lengths: the first is whole, the last half."""
    lengths = torch.linspace(size.columns, size.columns / 2, size.batch).long()
    return [(torch.arange(size.columns) < lengths[:, None])[:, None, None, :]]


def _ids(size: Size, dtype: torch.dtype) -> list[Tensor]:
    """Seven documents, of lengths that are multiples of nothing."""
    ends = torch.linspace(0, size.columns, 8)[1:-1].long() - 3
    return [torch.bucketize(torch.arange(size.columns), ends)]


FULL = Form("full", full, sdpa_full)
FULL_SHARP = Form("full, logits far apart", sharp, sdpa_sharp, score_mod=_sharp)
CAUSAL = Form("causal", causal, sdpa_causal, mask_mod=_is_causal, seen=0.5)
CAUSAL_DROPOUT = Form("causal, dropout 0.1", causal_dropout, sdpa_dropout, seen=0.5)
BOOL_MASK = Form("causal bool tensor", bool_mask, sdpa_mask, mask_mod=_in_mask, more=_lower, seen=0.5)
ADDITIVE_MASK = Form(
    "causal additive tensor", additive_mask, sdpa_mask, score_mod=_plus_mask, more=_lower_added, seen=0.5
)
PADDING = Form("key padding", bool_mask, sdpa_mask, mask_mod=_in_keys, more=_padding, seen=0.75)
SLIDING = Form(f"window {WINDOW}", window, sdpa_window, mask_mod=_in_window, seen=0.0)
DOCUMENTS = Form("documents", documents, mask_mod=_in_document, more=_ids, seen=0.0)
ALIBI = Form("causal, ALiBi", alibi, sdpa_alibi, score_mod=_less_far, mask_mod=_is_causal, seen=0.5)
SOFT_CAP = Form("causal, soft-cap", soft_cap, score_mod=_capped, mask_mod=_is_causal, seen=0.5)
