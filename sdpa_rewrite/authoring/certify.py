"""The proof: the pattern computes what the region computes, and each gradient is autograd of the pattern.

Both are evaluated on small random instances in float64, masked rows and special values included, as for a site.  Every
condition is to be seen on both sides: where it reads numbers that random data does not reach, larger values are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import Atom, Dim
from sdpa_rewrite.algebra.interpret import World, evaluate
from sdpa_rewrite.algebra.linear import is_linear
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.algebra.tiny import Inconsistent, TinyWorld, agree
from sdpa_rewrite.algebra.watch import Watch, magnitudes
from sdpa_rewrite.authoring.hole import is_program, program_name
from sdpa_rewrite.authoring.region import Region, summed
from sdpa_rewrite.site import Miss, Operand

NOT_EVALUATED = (Inconsistent, RuntimeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Draw:
    """How a small instance is drawn.  ``scales``: magnitudes of the values of tensors (1, if none are given)."""

    seed: int
    special: bool
    scales: tuple[float, ...] = ()


DRAWS = (Draw(0, False), Draw(1, False), Draw(2, True), Draw(3, True), Draw(4, True))
MORE = 4  # draws while a condition has shown one side only, and as many of larger values


class PatternWorld(World):
    """The pattern's side of a small instance: sizes and values are those of the graph's side."""

    def __init__(self, region: Region, theirs: TinyWorld, values: Mapping[str, Tensor]) -> None:
        found = {t for term in region.pattern.terms for t in subterms(term)}
        atoms = {a for t in found for a in (*t.axes, *(t.attr[1] if t.op == "reduce" else ()))}
        super().__init__(sorted(atoms, key=lambda a: (a.name, str(a.size))))
        self.region, self.theirs, self.given = region, theirs, values
        for term in sorted(found, key=lambda t: t.order):
            if is_program(term):
                self._run(term)

    def size(self, atom: Atom) -> int:
        """See ``World``."""
        dims = self.region.axes.dims
        if atom in dims:
            return int(self.theirs.extent(dims[atom]))
        if isinstance(atom.size, sympy.Symbol):
            return int(self.theirs.extent(self._named(atom)))
        raise Inconsistent(f"an axis of {atom.size} is unknown")

    def _named(self, atom: Atom) -> Dim:
        """The graph's axes of another axis of the same name."""
        known = [d for a, d in self.region.axes.dims.items() if a.size == atom.size]
        if not known:
            raise Inconsistent(f"an axis of {atom.size} is unknown")
        return known[0]

    def leaf(self, term: Term) -> Tensor:
        """See ``World``."""
        return self.given[self.region.pattern.parameters[term.attr[0]].name]

    def index(self, term: Term) -> Tensor:
        """See ``World``."""
        dim, start, step = term.attr
        wanted = tuple(b for a in dim for b in self.region.axes.dims.get(a) or self._named(a))
        if not wanted:
            return torch.full((1,), float(self.region.axes.number(start)), dtype=torch.float64)
        start, step = (_whole(self.region.axes.number(n)) for n in (start, step))
        return self.theirs.index(self.region.lifter.terms.index(wanted, start, step))

    def number(self, value: Any) -> Tensor:
        """See ``World``."""
        return self.theirs.number(self.region.axes.number(value))

    def _run(self, term: Term) -> None:
        """Give a program its value: what the graph makes of the pattern's argument."""
        program = self.region.programs[program_name(term)]
        mine = tuple((a,) for a in sorted(term.axes, key=lambda a: self.position[a]))
        dims = tuple(self.region.axes.dims.get(a) or self._named(a) for (a,) in mine)
        x = self.theirs.spread(self.gather(evaluate(term.args[0], self), mine), dims)
        captured = {n: self.theirs.spread(self.given[n], t.attr[1]) for n, t in program.captures.items()}
        value = program.applied(self.theirs, x, captured)
        self.values[term] = self.spread(self.theirs.gather(value, dims), mine)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value == int(value) else value


@dataclass(frozen=True, eq=False)
class Claim:
    """The value of ``term``, at node ``operand.node``, is the gradient of the parameter ``name``."""

    name: str
    operand: Operand
    term: Term


@dataclass
class Trial:
    """One random instance: the graph's world, the pattern's inputs and its results."""

    world: TinyWorld
    values: dict[str, Tensor]
    results: tuple[Tensor, ...]


def try_out(region: Region, draw: Draw, extra: Sequence[Term] = (), grad: bool = False) -> Trial:
    """Evaluate the pattern on random data."""
    terms = [*region.terms, *extra, *region.tensors.values()]
    columns = sorted(_columns(region), key=lambda a: a.name)
    world = TinyWorld(terms, columns, _generic(region, extra), draw.seed, draw.special, draw.scales)
    values: dict[str, Tensor] = {}
    for name, term in region.tensors.items():
        x = world.gather(evaluate(term, world), region.dims[name])
        wanted = grad and x.dtype.is_floating_point
        values[name] = x.detach().clone().requires_grad_(wanted)
    for name, term in region.scalars.items():
        x = evaluate(term, world).reshape(()).to(torch.float64)
        values[name] = x.detach().clone().requires_grad_(grad and term.op == "leaf")
    with torch.set_grad_enabled(grad):
        mine = PatternWorld(region, world, values)
        results = tuple(
            mine.gather(evaluate(t, mine), dims)
            for t, dims in zip(region.pattern.terms, region.pattern.dims, strict=True)
        )
    return Trial(world, values, results)


def result_dims(region: Region, k: int) -> tuple[Dim, ...]:
    """The graph's axes of each dimension of a result."""
    return tuple(region.axes.dim(d) for d in region.pattern.dims[k])


def _columns(region: Region) -> set[Atom]:
    """Axes along which a mask may cover a row: those that are summed away and that scores have."""
    gone = summed(region.terms)
    operands = {a for t in _factors(region.terms) for a in t.axes}
    masks = [t for t in region.tensors.values() if t not in _factors(region.terms)]
    return {a for t in masks for a in t.axes if a in gone or a not in operands} & set(gone)


def _factors(terms: Sequence[Term]) -> set[Term]:
    """Leaves that are multiplied in a contraction."""
    found: set[Term] = set()
    for term in terms:
        for t in subterms(term):
            if t.op == "reduce" and t.attr[0] == "sum" and t.args[0].op == "mul":
                found |= {a for a in t.args[0].args if a.op == "leaf"}
    return found


def _generic(region: Region, extra: Sequence[Term]) -> set[Any]:
    leaves = _factors([*region.terms, *extra])
    return {t.attr[0] for t in leaves}


def _draws(watch: Watch) -> Iterator[Draw]:
    """A fixed few, then more while a condition has shown one side only."""
    yield from DRAWS
    for seed in range(len(DRAWS), len(DRAWS) + MORE):
        if watch.open:
            yield Draw(seed, seed % 2 == 1)
    for seed in range(len(DRAWS) + MORE, len(DRAWS) + 2 * MORE):
        if watch.open:
            large = (c * n for n in magnitudes(watch.open) for c in (4.0, 64.0))
            yield Draw(seed, seed % 2 == 1, (1.0, *large))


def forward(region: Region) -> None:
    """Raise ``Miss`` unless the pattern is what the region computes."""
    watch = Watch(region.terms)
    root = region.roots[0].node
    for draw in _draws(watch):
        try:
            trial = try_out(region, draw)
            for k, term in enumerate(region.terms):
                theirs = trial.world.gather(evaluate(term, trial.world), result_dims(region, k))
                difference = agree(theirs, trial.results[k])
                if difference is not None:
                    raise Miss(f"it differs from the pattern on random data, by {difference:.3g}", "proof", root)
        except NOT_EVALUATED as error:
            raise Miss(f"it cannot be evaluated on a small instance: {error}", "proof", root) from error
        watch.note(trial.world)
    for stuck in watch.open:
        raise Miss(f"a condition in it had one outcome only in all draws: {stuck}", "proof", stuck.node or root)


def gradients(region: Region, cotangents: Sequence[Term | None], claims: Sequence[Claim]) -> list[Claim]:
    """The claims that hold on every draw, and that are linear in the cotangents by construction.

    One that has a condition of which only one side was seen does not count: a gradient that is clipped, but only where
    no draw came.
    """
    own = {t for term in region.terms for t in subterms(term)}
    given = [c for c in cotangents if c is not None]
    left = [c for c in claims if is_linear(c.term, given, own, _reads_tensors)]
    for draw in DRAWS[:2]:  # most claims are refuted at once: what is left is looked at more closely
        left = _agreeing(region, cotangents, left, draw)
    watch = Watch([c.term for c in left])
    for draw in _draws(watch):
        left = _agreeing(region, cotangents, left, draw, watch)
    stuck = set(watch.open)
    return [c for c in left if not stuck.intersection(subterms(c.term))]


def _reads_tensors(term: Term) -> bool:
    return any(t.op == "leaf" for t in subterms(term))


def _agreeing(
    region: Region,
    cotangents: Sequence[Term | None],
    claims: list[Claim],
    draw: Draw,
    watch: Watch | None = None,
) -> list[Claim]:
    if not claims:
        return []
    given = [c for c in cotangents if c is not None]
    try:
        trial = try_out(region, draw, [*given, *(c.term for c in claims)], grad=True)
    except NOT_EVALUATED:
        return []
    world = trial.world
    seeds = [
        torch.zeros_like(r) if c is None else world.gather(evaluate(c, world), result_dims(region, k)).to(r.dtype)
        for k, (c, r) in enumerate(zip(cotangents, trial.results, strict=True))
    ]
    names = [n for n, x in trial.values.items() if x.requires_grad]
    outputs = [(r, s) for r, s in zip(trial.results, seeds, strict=True) if r.requires_grad]
    found = torch.autograd.grad(
        [r for r, _ in outputs], [trial.values[n] for n in names], [s for _, s in outputs], allow_unused=True
    )
    true = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    kept = [c for c in claims if c.name in true and _holds(region, world, c, true[c.name])]
    if watch is not None:
        watch.note(world)
    return kept


def _holds(region: Region, world: TinyWorld, claim: Claim, gradient: Tensor) -> bool:
    dims = () if claim.name in region.scalars else region.dims[claim.name]
    try:
        value = evaluate(claim.term, world)
        wide = world.spread(gradient, dims) if dims else gradient.reshape([1] * len(world.order))
        have = {a for d in dims for a in d}
        gone = [world.position[a] for a in have - claim.operand.axes]
        wide = wide.sum(gone, keepdim=True) if gone else wide
        return agree(world.expanded(value, claim.operand.axes), wide) is None
    except NOT_EVALUATED:
        return False
