"""What the fused attention operator means, forward and backward, in eager PyTorch that holds all scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_rewrite.kernels import program
from sdpa_rewrite.kernels.philox import uniform
from sdpa_rewrite.kernels.spec import Part, Spec, output_strides

INFINITY = float("inf")


@dataclass(frozen=True)
class Call:
    """The operands of a call that forward and backward share.

    ``query`` (batch, heads, group, rows, depth), ``key`` (batch, heads, columns, depth), ``value`` (batch, heads,
    columns, width).  Captures have one dimension per axis of the scores, of size one where they do not vary.
    ``numbers`` starts with the sizes of the axes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captures: Sequence[Tensor]
    numbers: Sequence[int]
    spec: Spec

    @property
    def dtype(self) -> torch.dtype:
        """The type that scores and probabilities are computed in."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the axes of the scores."""
        return list(self.numbers[: sum(self.spec.split)])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores, in five dimensions."""
        return (*self.query.shape[:4], self.key.shape[2])

    def value_of(self, input: int) -> Tensor:
        """What a program reads, with one dimension per axis."""
        what = self.spec.inputs[input]
        if what.kind == "index" or (what.kind == "uniform" and self.captures[what.at].dim() == 0):
            position = self._position(what.axes)
            return position if what.kind == "index" else uniform(self.captures[what.at], position)
        value = self.captures[what.at]
        if what.kind == "uniform":  # the numbers themselves, in the order of their own dimensions
            apart = value.reshape([self.sizes[k] for k in what.axes])
            return apart.permute([what.axes.index(k) for k in sorted(what.axes)])
        return value.to(self.dtype) if value.is_floating_point() else value

    def _position(self, axes: Sequence[int]) -> Tensor:
        sizes = self.sizes
        out = torch.zeros((), dtype=torch.int64, device=self.query.device)
        for axis in axes:
            shape = [sizes[k] if k == axis else 1 for k in range(len(sizes))]
            step = torch.arange(sizes[axis], device=self.query.device).reshape(shape)
            out = out * sizes[axis] + step
        return out

    def run(self, part: Part, *scores: Tensor) -> tuple[Tensor, ...]:
        """A program on tensors of five dimensions; its results have one dimension per axis."""
        apart = [s.reshape(self.sizes) for s in scores]
        results: tuple[Tensor, ...] = program.read(part.program)(*apart, *(self.value_of(k) for k in part.inputs))
        return results

    def together(self, x: Tensor) -> Tensor:
        """In five dimensions."""
        return x.to(self.dtype).expand(self.sizes).reshape(self.shape)

    def scores(self) -> Tensor:
        """Query times key, scaled."""
        q, k = (x.to(self.dtype) for x in (self.query, self.key))
        return q @ k.mT.unsqueeze(2) * self.spec.scale

    def logits(self, scores: Tensor) -> Tensor:
        """The score program's values."""
        part = self.spec.score
        return scores if part is None else self.together(self.run(part, scores)[0])

    def factor(self) -> Tensor | None:
        """What probabilities are multiplied by."""
        part = self.spec.factor
        return None if part is None else self.together(self.run(part)[0])


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and of each row the largest logit and the sum of exp(logit - largest)."""
    logits = call.logits(call.scores())
    maximum = logits.amax(-1)
    shifted = (logits - _finite(maximum)[..., None]).exp()
    total = shifted.sum(-1)
    factor = call.factor()
    weights = shifted if factor is None else shifted * factor
    out = weights @ call.value.to(call.dtype).unsqueeze(2) / total[..., None]
    if call.spec.safe:
        out = torch.where((maximum == -INFINITY)[..., None], 0.0, out)
    return _laid(out, call.spec.order, call.spec.out_dtype), maximum, total


def backward(
    call: Call, out: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, and of each learned input, with one dimension per axis, in float32 at least."""
    scores = call.scores()
    logits = call.logits(scores)
    share = 1.0 / total[..., None]
    if call.spec.safe:
        share = torch.where((maximum == -INFINITY)[..., None], 0.0, share)
    probability = (logits - _finite(maximum)[..., None]).exp() * share
    wide = grad.to(call.dtype)
    slopes = wide @ call.value.to(call.dtype).mT.unsqueeze(2)
    factor = call.factor()
    weights = probability
    if factor is not None:
        slopes, weights = slopes * factor, probability * factor
    delta = (probability * slopes).sum(-1)  # kernels take grad . out where no learned input sums a row of slopes
    if grad_total is not None:
        delta = delta - total * grad_total
    slopes = probability * (slopes - delta[..., None])
    learned: dict[int, Tensor] = {}
    if call.spec.score_backward is not None:
        part = call.spec.score_backward
        first, *rest = call.run(part, scores, slopes)
        slopes = call.together(first)
        learned = dict(zip(part.learned, rest, strict=True))
    slopes = slopes * call.spec.scale
    grad_query = slopes @ call.key.to(call.dtype).unsqueeze(2)
    grad_key = (slopes.mT @ call.query.to(call.dtype)).sum(2)
    grad_value = (weights.mT @ wide).sum(2)
    grads = zip((grad_query, grad_key, grad_value), call.spec.grad_orders, strict=True)
    return (
        *(_laid(x, order, call.query.dtype) for x, order in grads),
        *(_summed(call, learned.get(k), call.captures[call.spec.inputs[k].at]) for k in call.spec.learned),
    )


def _laid(x: Tensor, order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``x`` in memory whose dimensions lie in ``order``."""
    return torch.empty_strided(x.shape, output_strides(x.shape, order), dtype=dtype, device=x.device).copy_(x)


def _finite(maximum: Tensor) -> Tensor:
    return torch.where(maximum == -INFINITY, 0.0, maximum)


def _summed(call: Call, value: Tensor | None, capture: Tensor) -> Tensor:
    """Over the axes that ``capture`` does not vary along."""
    if value is None:
        return torch.zeros(capture.shape, dtype=call.dtype, device=capture.device)
    full = value.to(call.dtype).expand(call.sizes)
    dims = [k for k, n in enumerate(capture.shape) if n == 1]
    return full.sum(dims, keepdim=True) if dims else full.contiguous()
