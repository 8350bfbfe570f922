"""The fused attention operators.

``attention`` gives the output and two statistics of each row, ``attention_backward`` the gradients.  Score and weight
programs travel as data in ``spec`` (see ``kernels.spec`` and ``kernels.program``), captured tensors as a list.  In
eager they are what ``kernels.eager`` says; Inductor's lowerings are in ``kernels.cpu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdpa_rewrite.kernels import eager
from sdpa_rewrite.kernels.spec import Spec, output_strides

_CALL = "Tensor query, Tensor key, Tensor value, Tensor[] captures, SymInt[] numbers, str spec"
_library = torch.library.Library("sdpa_rewrite", "FRAGMENT")
_library.define(f"attention({_CALL}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"attention_backward({_CALL}, Tensor out, Tensor maximum, Tensor total, Tensor grad, Tensor? grad_total)"
    " -> Tensor[]"
)

attention = torch.ops.sdpa_rewrite.attention.default
attention_backward = torch.ops.sdpa_rewrite.attention_backward.default


def _attention(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], numbers: Sequence[int], spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    return eager.forward(eager.Call(query, key, value, captures, numbers, Spec.of(spec)))


def _attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    numbers: Sequence[int],
    spec: str,
    *rest: Any,
) -> list[Tensor]:
    return list(eager.backward(eager.Call(query, key, value, captures, numbers, Spec.of(spec)), *rest))


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], numbers: Sequence[int], spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    what = Spec.of(spec)
    shape = (*query.shape[:4], value.shape[-1])
    out = query.new_empty_strided(shape, output_strides(shape, what.order), dtype=what.out_dtype)
    rows = query.new_empty(query.shape[:4], dtype=torch.promote_types(query.dtype, torch.float32))
    return out, rows, torch.empty_like(rows)


def _backward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    numbers: Sequence[int],
    spec: str,
    *rest: Any,
) -> list[Tensor]:
    what = Spec.of(spec)
    wide = torch.promote_types(query.dtype, torch.float32)
    learned = [captures[what.inputs[k].at] for k in what.learned]
    operands = zip((query, key, value), what.grad_orders, strict=True)
    grads = [x.new_empty_strided(x.shape, output_strides(x.shape, order)) for x, order in operands]
    return [*grads, *(x.new_empty(x.shape, dtype=wide) for x in learned)]


torch.library.register_fake(attention, _attention_fake, lib=_library)
torch.library.register_fake(attention_backward, _backward_fake, lib=_library)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, numbers: Sequence[int], spec: str, *captures: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, maximum, total = attention(query, key, value, captures, numbers, spec)
        ctx.save_for_backward(query, key, value, out, maximum, total, *captures)
        ctx.static = numbers, spec
        ctx.mark_non_differentiable(maximum)
        ctx.set_materialize_grads(False)
        return out, maximum, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _, grad_total = grads
        query, key, value, out, maximum, total, *captures = ctx.saved_tensors
        numbers, text = ctx.static
        grad = torch.zeros_like(out) if grad is None else grad
        rows = out, maximum, total, grad, grad_total
        found = attention_backward(query, key, value, captures, numbers, text, *rows)
        spec = Spec.of(text)
        learned: list[Tensor | None] = [None] * len(captures)
        for input, gradient in zip(spec.learned, found[3:], strict=True):
            at = spec.inputs[input].at
            learned[at] = gradient.to(captures[at].dtype)
        return *found[:3], None, None, *learned


def differentiable_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attention`` with gradients of query, key, value and the learned captures, through output and sum.

    The largest logit is a constant: a function of it and the sum that does not depend on the shift between the two has
    the right gradient through the sum alone.
    """
    apply: Any = _Differentiable.apply
    found: tuple[Tensor, Tensor, Tensor] = apply(query, key, value, numbers, spec.text(), *captures)
    return found
