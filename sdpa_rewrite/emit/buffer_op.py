"""An identity that tells Inductor where to keep a value, for the C++ template of FlexAttention.

The template cannot read a value that has no buffer, and takes no epilogue though Inductor would give it one.  It
forgets where in a buffer query, key and value begin, and looks for their sizes in the buffer, not in the view.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Role = Literal["read", "operand", "result"]

_library = torch.library.Library("sdpa_rewrite", "FRAGMENT")
_library.define("buffer(Tensor x, str role) -> Tensor")


@torch.library.impl(_library, "buffer", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator, unused-ignore]
def _copy(x: Tensor, role: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


@torch.library.register_fake("sdpa_rewrite::buffer")  # type: ignore[untyped-decorator, unused-ignore]
def _fake(x: Tensor, role: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def buffer(x: Tensor, role: Role) -> Tensor:
    """``x`` in memory, fit to be read by the template, to be its query, key or value, or to be its result."""
    register_lowering()
    out: Tensor = torch.ops.sdpa_rewrite.buffer(x, role)
    return out


def register_lowering() -> None:
    """Tell Inductor, which is imported here, what to make of the operator."""
    from torch._inductor import lowering

    operator = torch.ops.sdpa_rewrite.buffer.default
    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(_lower)


def _lower(x: Any, role: str) -> Any:
    from torch._inductor import ir

    realized = ir.ExternKernel.realize_input(x)
    if role == "operand":
        return _whole(x, realized)
    if role == "result":
        return _unfused(x, realized)
    return _by_other_kernel(x) if _inlined(realized) else ir.TensorBox(realized)


def _whole(x: Any, realized: Any) -> Any:
    """A buffer, or a view that begins where its buffer begins and has as many dimensions; copied if need be."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    behind = ir.as_storage_and_layout(ir.TensorBox(realized), freeze=False)[0].get_layout()
    if realized.get_layout().offset == 0 and len(behind.size) == len(x.get_size()):
        return ir.TensorBox(realized)
    order = ir.get_stride_order(realized.get_stride(), V.graph.sizevars.shape_env)
    copied = ir.ExternKernel.copy_input(ir.TensorBox(realized))
    return ir.ExternKernel.require_stride_order(copied, order)


def _unfused(x: Any, realized: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    apart = getattr(V.graph, "no_fuse_buffer_names", None)
    if apart is None:
        return _by_other_kernel(x)
    apart.add(realized.get_name())
    return ir.TensorBox(realized)


def _inlined(realized: Any) -> bool:
    """Inductor computes what reads no memory (a constant, a size) where it is used, buffer or not."""
    data = realized.data if hasattr(realized, "data") else realized
    reads = getattr(data, "num_reads", None)
    return reads is not None and reads() == 0


def _by_other_kernel(x: Any) -> Any:
    """A copy by a kernel that is not generated: it is neither inlined nor fused."""
    from torch._inductor import lowering

    return lowering.fallback_handler(torch.ops.aten.clone.default, add_to_fallback_set=False)(x)
