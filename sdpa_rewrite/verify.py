"""Does an emitter build what the site means?  Run it on small random instances, forward and backward, and compare.

The proof of a site says what its meaning is; this says that the replacement has it too: masks, rows masked as a
whole, and gradients included.  It costs milliseconds, once for all sites of a graph that are alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph

from sdpa_rewrite import config
from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, atoms_of
from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.algebra.tiny import TinyWorld, agree
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.emit.arrange import Sizes, Unavailable, arrange
from sdpa_rewrite.emit.base import Emitter, Inputs
from sdpa_rewrite.emit.dropout import dropout_rate
from sdpa_rewrite.prove import NOT_EVALUATED, tolerance
from sdpa_rewrite.reference import attention
from sdpa_rewrite.site import Operand, Site

log = logging.getLogger("sdpa_rewrite")

SEEDS = ((0, False), (1, True), (2, True))  # generic values; -inf; finite minima
TOLERANCE = 1e-7


class NaturalWorld(TinyWorld):
    """A small world in which an index counts the positions of its axis, as it does in an emitter."""

    def index(self, term: Term) -> Tensor:
        """0, 1, 2, ... times step plus start."""
        dim, start, step = term.attr
        flat = torch.arange(self.extent(dim), dtype=torch.float64)
        return flat * self._concrete_size(step) + self._concrete_size(start)


@dataclass(frozen=True)
class Instance:
    """A site with small axes, and tensors for its roles."""

    site: Site
    tensors: Mapping[str, Tensor]
    numbers: Mapping[sympy.Symbol, Any]

    def inputs(self) -> Inputs:
        """What an emitter reads."""
        operands = roles(self.site)
        pairs = {r: (x, operands[r].dims) for r, x in self.tensors.items()}
        return Inputs(pairs, Sizes(pairs.values(), self.numbers))


def roles(site: Site) -> dict[str, Operand]:
    """The operands of a site by role."""
    return {"query": site.query, "key": site.key, "value": site.value, **{c.name: c.operand for c in site.captures}}


def difference(site: Site, emitter: Emitter) -> str:
    """Where the replacement differs from the meaning of ``site``, in words; empty when they agree.

    Empty too where no small instance can be made, or the emitter's operator does not run on one: that says nothing.
    """
    try:
        with clean_room():
            found = (_difference(site, emitter, seed, special) for seed, special in SEEDS)
            return next(filter(None, found), "")
    except (*NOT_EVALUATED, NotImplementedError, Unavailable) as error:
        if config.strict:
            raise
        log.debug("a replacement by %s was not verified: %s", emitter.name, error)
        return ""


def _difference(site: Site, emitter: Emitter, seed: int, special: bool) -> str:
    if config.dropout == "any" and dropout_rate(site) is not None:  # a mask of the kernel's own: all else is compared
        site = replace(site, weight=site.terms.hole("probability", site.scores_axes))
    terms = {"query": site.query_term, "key": site.key_term, "value": site.value_term}
    generic = {t.attr[0] for t in terms.values() if t.op == "leaf"}
    world = NaturalWorld([site.result_term, *terms.values()], site.columns, generic, seed, special)
    terms |= {c.name: c.term for c in site.captures}
    wanted = sorted({g.role for g in site.gradients})
    values = {name: world.expanded(evaluate(t, world), roles(site)[name].axes) for name, t in terms.items()}
    values = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in values.items()}
    with torch.set_grad_enabled(bool(wanted)):
        theirs = world.gather(attention(site, world, values), tuple((a,) for a in atoms_of(site.result.dims)))
        instance = small(site, world, values)  # now the world has given all symbols values
        out, dims = emitter.emit(instance.site, instance.inputs())
        flat: Dims = tuple((a,) for a in atoms_of(instance.site.result.dims))
        ours = arrange(out, dims, flat, instance.inputs().sizes)
    allowed = max(TOLERANCE, tolerance(site))
    if agree(ours.detach(), theirs.detach(), allowed) is not None:
        return "the output of the replacement differs on a small instance"
    if not wanted or not theirs.requires_grad:
        return ""
    cotangent = torch.randn(theirs.shape, generator=world.random, dtype=torch.float64)
    mine = torch.autograd.grad(ours, [values[r] for r in wanted], cotangent, allow_unused=True)
    true = torch.autograd.grad(theirs, [values[r] for r in wanted], cotangent, allow_unused=True)
    for role, a, b in zip(wanted, mine, true, strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and agree(a, b, allowed) is not None):
            return f"the gradient of the {role} differs in the replacement, on a small instance"
    return ""


def small(site: Site, world: TinyWorld, values: Mapping[str, Tensor]) -> Instance:
    """``site`` with the sizes of ``world``, its operands holding ``values``."""
    atoms = {a: Atom(a.name, world.size(a)) for a in world.order}
    graph, tensors = Graph(), {}

    def dim(of: Dim) -> Dim:
        return tuple(atoms[a] for a in of)

    def operand(name: str, of: Operand, value: Tensor) -> Operand:
        node = graph.placeholder(name)
        node.meta["val"] = tensors[name] = world.gather(value, of.dims)
        return Operand(node, tuple(map(dim, of.dims)))

    def renamed(term: Term) -> Term:
        return site.terms.rename(term, atoms)

    found = {name: operand(name, of, values[name]) for name, of in roles(site).items()}
    shrunk = replace(
        site,
        batch=dim(site.batch),
        rows=dim(site.rows),
        columns=dim(site.columns),
        depth=dim(site.depth),
        width=dim(site.width),
        query=found["query"],
        key=found["key"],
        value=found["value"],
        score=renamed(site.score),
        weight=renamed(site.weight),
        sink=renamed(site.sink) if site.sink is not None else None,
        captures=tuple(replace(c, term=renamed(c.term), operand=found[c.name]) for c in site.captures),
        result=operand("result", site.result, torch.zeros((), dtype=torch.float64)),
    )
    del tensors["result"]
    return Instance(shrunk, tensors, {s: _plain(v) for s, v in world.symbols.items()})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, sympy.Integer) else float(value)
