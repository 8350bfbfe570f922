"""Torch's FlexAttention while a replacement is traced."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.attention.flex_attention as public
from torch import Tensor
from torch._guards import tracing
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from sdpa_rewrite.emit.arrange import Unavailable

ScoreMod = Callable[..., Tensor]


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod,
    buffers: tuple[Tensor, ...],
    scale: float,
    blocks: BlockMask | None = None,
    logsumexp: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``torch.nn.attention.flex_attention.flex_attention``, with the tensors that ``score_mod`` reads given one by one.

    ``score_mod`` gets ``buffers`` after its five arguments.  Returns the output and, if asked for, the logsumexp.
    """
    call = _with_buffers(buffers)
    gqa = q.shape[1] != k.shape[1]
    with nullcontext() if isinstance(q, FakeTensor) else _no_compilation():
        if not logsumexp:
            return call(q, k, v, score_mod, blocks, scale, gqa), None
        out, aux = call(q, k, v, score_mod, blocks, scale, gqa, return_aux=AuxRequest(lse=True))
        return out, aux.lse


def _no_compilation() -> AbstractContextManager[Any]:
    """The operator takes the fake tensors of a compilation that it finds under way, even for real tensors."""
    context: AbstractContextManager[Any] = tracing(None)
    return context


def _with_buffers(buffers: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The public function, with ``buffers`` handed to its operator.

    Dynamo finds the tensors in ``score_mod``'s closure when it compiles the public function, and turns them into
    arguments of the operator.  Here no Dynamo runs, so a copy of the function gets an operator that adds them.
    Everything that differs between versions of torch stays in the public function.
    """
    function = public.flex_attention
    if "flex_attention_hop" not in function.__globals__:
        raise Unavailable("this torch's flex_attention calls an operator that is not known here")
    operator = function.__globals__["flex_attention_hop"]

    def with_buffers(*args: Any) -> Any:
        return operator(*args, buffers, ())

    names = {
        "flex_attention_hop": with_buffers,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "_validate_device": lambda *args: None,  # the emitter knows; in eager the operator works anywhere
    }
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def all_blocks(q: Tensor, k: Tensor, sizes: tuple[int, int]) -> BlockMask:
    """A mask in which every block of ``sizes`` (rows, columns) takes part.

    Without one the whole matrix is a single block.  One row and one column more than needed keep their number from
    ever being one, which torch would make a guard of.
    """
    (rows, columns), device = (q.shape[2], k.shape[2]), q.device
    across = columns // sizes[1] + 2
    count = (columns + sizes[1] - 1) // sizes[1]
    numbers = torch.full((1, 1, rows // sizes[0] + 2), count, dtype=torch.int32, device=device)
    indices = torch.arange(across, dtype=torch.int32, device=device) + torch.zeros_like(numbers)[..., None]
    made: BlockMask = BlockMask.from_kv_blocks(  # torch 2.11 does not say its type
        numbers, indices, BLOCK_SIZE=sizes, seq_lengths=(rows, columns), compute_q_blocks=False
    )
    return made


def runs_on_cpu() -> bool:
    """Whether Inductor's C++ FlexAttention supports this machine."""
    try:
        from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported
    except ImportError:
        return False
    return bool(check_cpu_supported())


def separates_shared_buffers() -> bool:
    """Whether the C++ template copes with query, key and value that are views of one tensor."""
    from torch._inductor.kernel.flex import flex_cpu

    return hasattr(flex_cpu, "_realize_duplicate_buffer_inputs")
