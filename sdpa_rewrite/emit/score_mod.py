"""A score program as FlexAttention's ``score_mod``: a function of one score and of its position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Size, size_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.emit.base import Inputs
from sdpa_rewrite.emit.buffer_op import buffer
from sdpa_rewrite.emit.heads import Heads
from sdpa_rewrite.emit.scalars import constant, value_at
from sdpa_rewrite.site import Site

GIANT = 1e30  # below it a logit is so small that it only matters which of such logits are equal


@dataclass
class Program:
    """``score`` of a site, ready to be called by FlexAttention with ``buffers`` after the five arguments.

    With ``sink``, the first column is the sink's logit and the site's own columns follow.  ``in_memory``: the kernel
    can only read what has a buffer.  ``log2``: it multiplies the logits by log2(e), in which the smallest finite float
    would overflow.
    """

    site: Site
    heads: Heads
    score: Term
    sink: Term | None
    in_memory: bool = False
    log2: bool = False
    dtype: torch.dtype = torch.float32
    buffers: list[Tensor] = field(default_factory=list)
    _captures: dict[Term, tuple[int, Dims]] = field(default_factory=dict)
    _symbols: dict[str, int] = field(default_factory=dict)
    _shift: tuple[int, tuple[int, ...]] | None = None

    def read(self, inputs: Inputs) -> None:
        """Take what the program reads from ``inputs``."""
        programs = [self.score] if self.sink is None else [self.score, self.sink]
        used = {t for program in programs for t in subterms(program)}
        for capture in self.site.captures:
            hole = self.site.terms.hole(capture.name, capture.operand.axes)
            if hole in used:
                tensor, dims = _varying(*inputs.tensors[capture.name])
                self._captures[hole] = len(self.buffers), dims
                self.buffers.append(self._readable(tensor))
        for size in symbolic_sizes(self.site, self.heads, programs):
            self._symbols[str(size)] = len(self.buffers)
            value = inputs.sizes.of(size)
            dtype = torch.int64 if isinstance(value, (int, torch.SymInt)) else self.dtype
            device = inputs.tensors["query"][0].device
            self.buffers.append(self._readable(torch.full((1,), value, dtype=dtype, device=device)))

    def subtract(self, shift: Tensor) -> None:
        """Take ``shift`` (batch, heads, rows) off the logits of each row, which changes no probability."""
        along = tuple(k for k in range(3) if size_of(shift.shape[k]) != 1)
        for k in reversed(range(3)):
            shift = shift if k in along else shift.select(k, 0)
        self._shift = len(self.buffers), along
        self.buffers.append(self._readable(shift))

    def _readable(self, x: Tensor) -> Tensor:
        x = x if x.dim() else x.reshape(1)
        return buffer(x, "read") if self.in_memory else x

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor, *buffers: Tensor) -> Tensor:
        """The logit of one position."""
        at = column if self.sink is None else torch.clamp_min(column - 1, 0)
        point = _Point(self, (b, h, row, at), buffers)
        point.values[self.site.terms.hole("score", self.site.scores_axes)] = score.to(self.dtype)
        logit = point.value(self.score).to(self.dtype)
        if self.sink is not None:
            logit = torch.where(column == 0, point.value(self.sink).to(self.dtype), logit)
        if self._shift is not None:
            buffer_at, along = self._shift
            place = tuple((b, h, row)[k] for k in along) or (b * 0,)
            logit = logit - buffers[buffer_at][place]
        return _less_giant(logit) if self.log2 else logit


def symbolic_sizes(site: Site, heads: Heads, programs: list[Term]) -> list[Size]:
    """The symbolic numbers that ``programs`` read, and the symbolic sizes that tell their indices apart."""
    found: dict[str, Size] = {}

    def note(size: Size) -> None:
        if isinstance(size, sympy.Basic) and not size.is_number:
            found[str(size)] = size

    def take_apart(dim: Dim) -> None:
        for atom in dim[1:]:
            note(atom.size)

    dims: list[Dim] = [heads.batch, heads.heads, site.rows, site.columns]
    for term in (t for program in programs for t in subterms(program)):
        if term.op == "number":
            note(size_of(term.attr))
        elif term.op == "index":
            take_apart(term.attr[0])
            note(size_of(term.attr[1]))
            note(size_of(term.attr[2]))
        elif term.op == "hole":
            dims += [d for c in site.captures if c.name == term.attr for d in c.operand.dims]
    for dim in dims:
        take_apart(dim)
    return list(found.values())


def _varying(x: Tensor, dims: Dims) -> tuple[Tensor, Dims]:
    """``x`` without the dimensions along which it does not vary."""
    kept: list[Dim] = []
    for dim in dims:
        at = len(kept)
        if not dim or size_of(x.stride(at)) == 0:
            x = x.select(at, 0)
        else:
            kept.append(dim)
    return x, tuple(kept)


def _less_giant(logit: Tensor) -> Tensor:
    """Halve what lies below -GIANT: monotonic, equal stays equal, and the gradient is one."""
    excess = torch.clamp_max(logit + GIANT, 0.0).detach() * 0.5
    return torch.where(torch.isinf(logit), logit, logit - excess)


@dataclass
class _Point:
    """One position: the values of terms there."""

    program: Program
    position: tuple[Tensor, Tensor, Tensor, Tensor]
    buffers: tuple[Tensor, ...]
    values: dict[Term, Tensor] = field(default_factory=dict)
    axes: dict[Atom, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dim, index in zip(self._groups, self.position, strict=True):
            for atom in reversed(dim[1:]):
                size = self.number(atom.size)
                self.axes[atom] = torch.remainder(index, size)
                index = torch.div(index, size, rounding_mode="floor")
            if dim:
                self.axes[dim[0]] = index

    @property
    def _groups(self) -> tuple[Dim, Dim, Dim, Dim]:
        site, heads = self.program.site, self.program.heads
        return heads.batch, heads.heads, site.rows, site.columns

    def value(self, term: Term) -> Tensor:
        """The value of ``term`` here, without a dimension."""
        return value_at(term, self.values, self._leaf, self.program.dtype)

    def _leaf(self, term: Term) -> Tensor:
        if term.op == "hole":
            return self._captured(term)
        if term.op == "number":
            return self._constant(term.attr)
        dim, start, step = term.attr
        out = self.index(dim)
        out = out if step == 1 else out * self.number(step)
        return out if start == 0 else out + self.number(start)

    def index(self, dim: Dim) -> Tensor:
        """The place along ``dim``."""
        for group, index in zip(self._groups, self.position, strict=True):
            if group == dim:
                return index
        out = self.axes[dim[0]]
        for atom in dim[1:]:
            out = out * self.number(atom.size) + self.axes[atom]
        return out

    def _captured(self, hole: Term) -> Tensor:
        buffer, dims = self.program._captures[hole]
        if not dims:
            return self._only(buffer)
        return self.buffers[buffer][tuple(self.index(d) for d in dims)]

    def _only(self, buffer: int) -> Tensor:
        return self.buffers[buffer][(self.position[0] * 0,)]

    def number(self, size: Size) -> Any:
        """A size: a number where it is static, else read from where it is held."""
        if isinstance(size, int):
            return size
        return int(size) if size.is_number else self._only(self.program._symbols[str(size)])

    def _constant(self, value: Any) -> Tensor:
        if isinstance(value, sympy.Basic) and not value.is_number:
            return self._only(self.program._symbols[str(value)])
        return constant(value, self.program.dtype, self.position[0].device)
