"""What an emitter is, and what it reads of a site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims
from sdpa_rewrite.emit.arrange import RealWorld, Sizes, arrange
from sdpa_rewrite.site import Operand, Site


@dataclass(frozen=True)
class Inputs:
    """The tensors of a site by role (``query``, ``key``, ``value``, captures by name), each with its dimensions."""

    tensors: Mapping[str, tuple[Tensor, Dims]]
    sizes: Sizes

    def arranged(self, role: str, groups: list[Dim], fill: list[bool] | None = None) -> Tensor:
        """A role's tensor with one dimension per group of axes; groups it lacks stay of size one where not filled."""
        tensor, dims = self.tensors[role]
        return arrange(tensor, dims, groups, self.sizes, fill)

    def world(self, site: Site, order: list[Atom], dtype: torch.dtype) -> RealWorld:
        """A world over ``order`` in which the captures have their values."""
        device = self.tensors["query"][0].device
        world = RealWorld(order, self.sizes, {}, device, dtype)
        for capture in site.captures:
            tensor, dims = self.tensors[capture.name]
            hole = site.terms.hole(capture.name, capture.operand.axes)
            world.values[hole] = world.place(Operand(capture.operand.node, dims), tensor)
        return world


class Emitter(Protocol):
    """Makes fused attention of a site, in differentiable PyTorch."""

    name: str

    def reasons_against(self, site: Site) -> list[str]:
        """Why this emitter cannot take the site; empty when it can."""

    def prepared(self, site: Site) -> Site:
        """The site as this emitter reads it: a capture may be read from another node."""

    def emit(self, site: Site, inputs: Inputs) -> tuple[Tensor, Dims]:
        """The output of the site and its dimensions."""


def dtype_of(operand: Operand) -> torch.dtype:
    """The type of an operand's tensor."""
    dtype: torch.dtype = operand.node.meta["val"].dtype
    return dtype


def device_of(site: Site) -> torch.device:
    """The device that the site runs on."""
    device: torch.device = site.query.node.meta["val"].device
    return device


def compute_dtype(site: Site) -> torch.dtype:
    """The type to run in: as wide as the operands and the result."""
    dtype = dtype_of(site.result)
    for operand in (site.query, site.key, site.value):
        dtype = torch.promote_types(dtype, dtype_of(operand))
    return dtype


def inlines(target: object) -> bool:
    """Whether Inductor has a pointwise lowering for ``target``, itself or by decomposition."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallbacks, lowerings

    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return (target in lowerings and target not in fallbacks) or target in select_decomp_table()
