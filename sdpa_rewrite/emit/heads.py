"""How the batch axes of a site become the batch and head dimensions of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims
from sdpa_rewrite.emit.arrange import RealWorld
from sdpa_rewrite.site import Site


@dataclass(frozen=True)
class Heads:
    """``batch`` and ``heads`` of query and output; key and value have the ``shared`` heads, ``group`` fewer."""

    batch: Dim
    shared: Dim
    group: Dim

    @property
    def heads(self) -> Dim:
        """The heads of query and output."""
        return (*self.shared, *self.group)


def heads_of(site: Site, varying: frozenset[Atom] = frozenset()) -> Heads:
    """Grouped heads innermost; the other axes so that a bias over the axes ``varying`` is a broadcast, not a copy."""
    axes = site.key.axes | site.value.axes
    group = tuple(a for a in site.batch if a not in axes)
    rest = tuple(a for a in site.batch if a in axes)
    inside = varying & set(rest)
    if inside and inside != set(rest) and not group:
        a = tuple(x for x in rest if x in inside)
        b = tuple(x for x in rest if x not in inside)
        return Heads(a, b, ()) if rest[0] in inside else Heads(b, a, ())
    if not group:
        return Heads(rest[:-1], rest[-1:], ()) if len(rest) > 1 else Heads(rest, (), ())
    if not rest:
        return Heads((), (), group)
    if len(rest) == 1:
        return Heads(rest, (), group) if len(site.batch) > 1 and site.batch[0] is rest[0] else Heads((), rest, group)
    return Heads(rest[:-1], rest[-1:], group)


def grouped(site: Site, heads: Heads, x: Tensor, world: RealWorld) -> Tensor:
    """Over all axes -> (batch, heads, rows, columns), each of size one where ``x`` does not vary."""
    return in_groups((heads.batch, heads.heads, site.rows, site.columns), x, world)


def in_groups(groups: Dims, x: Tensor, world: RealWorld) -> Tensor:
    """Over all axes, in the order of ``groups`` -> one dimension a group, of size one where ``x`` does not vary."""
    x = x.reshape([1] * (len(world.order) - x.dim()) + list(x.shape))
    full: list[int] = []
    shape: list[int] = []
    at = 0
    for group in groups:
        wide = any(not _one(x.shape[at + k]) for k in range(len(group)))
        extent = 1
        for atom in group:
            n = world.size(atom) if wide else 1
            full.append(n)
            extent = extent * n
            at += 1
        shape.append(extent)
    return x.expand(full).reshape(shape)


def _one(n: int) -> bool:
    return isinstance(n, int) and n == 1
