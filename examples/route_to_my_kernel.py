"""Route an attention to a kernel of your own: a custom operator with autograd, registered by torch.library."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

import sdpa_rewrite
from sdpa_rewrite import Match, NoMatch


@torch.library.custom_op("sdpa_rewrite_example::relu_attention", mutates_args=())
def relu_attention_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for a kernel: query by query, so that no N x N tensor is made."""
    rows = [torch.relu(row[..., None, :] @ k.mT) @ v for row in q.unbind(-2)]
    return torch.cat(rows, -2)


@relu_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = ctx.saved_tensors
    scores = q @ k.mT
    ds = (grad @ v.mT) * (scores > 0)
    return ds @ k, ds.mT @ q, torch.relu(scores).mT @ grad


relu_attention_op.register_autograd(_backward, setup_context=_save)


@sdpa_rewrite.pattern(register=False, devices=("cpu",))
def relu_attention(
    q: Annotated[Tensor, "b h i d"], k: Annotated[Tensor, "b h j d"], v: Annotated[Tensor, "b h j e"]
) -> Tensor:
    """Attention with a relu in place of the softmax."""
    return (q @ k.mT).relu() @ v


@relu_attention.replace
def my_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator."""
    out: Tensor = relu_attention_op(q, k, v)
    return out


@relu_attention.check
def long_enough(m: Match) -> None:
    """A kernel that is worth it from sixteen keys on."""
    keys = m.sizes["j"]
    if isinstance(keys, int) and keys < 16:
        raise NoMatch(f"{keys} keys are too few for the kernel", at=m["k"])


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a user wrote."""
    return torch.relu(torch.einsum("bhid,bhjd->bhij", q, k)) @ v


def main() -> None:
    """A long sequence is routed to the kernel, a short one is not."""
    for n in (32, 8):
        q, k, v = (torch.randn(2, 3, n, 4, requires_grad=True) for _ in range(3))
        with sdpa_rewrite.patterns.scope(relu_attention):
            print(sdpa_rewrite.explain(attention, q, k, v))


if __name__ == "__main__":
    main()
