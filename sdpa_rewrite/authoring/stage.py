"""The stage of the pipeline in which the patterns that are on look at a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Graph, Node

from sdpa_rewrite import config
from sdpa_rewrite.algebra.axes import product
from sdpa_rewrite.authoring import adjoint, certify, registry, replace
from sdpa_rewrite.authoring.adjoint import Backward
from sdpa_rewrite.authoring.describe import diagnosis
from sdpa_rewrite.authoring.lifted import LiftedPattern, kind_of, kinds_below, lifted_variants
from sdpa_rewrite.authoring.opener import Opener
from sdpa_rewrite.authoring.parameters import Variant
from sdpa_rewrite.authoring.pattern import Match, MatchedScalar, MatchedTensor, NoMatch, Pattern
from sdpa_rewrite.authoring.region import Near, Region, regions_at
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.lift.lifter import Axes
from sdpa_rewrite.lift.ops import CASTS, LAYOUT, is_call, is_tensor, opname, source_line, value_of
from sdpa_rewrite.outcome import Outcome, Reason
from sdpa_rewrite.rewrite import Refused
from sdpa_rewrite.site import Miss

WORTH_TELLING = 0.3  # of a pattern found, for a near miss to be told where nobody has asked
WORTH_TELLING_ITS_AUTHOR = 0.2  # ... where the engine fuses the place, which is not what the author wanted


@dataclass(frozen=True)
class Taught:
    """What the patterns did: ``outcomes`` of the places that they rewrote, those that they leave as they are with the
    nodes of each (``declined``), and where they nearly matched."""

    outcomes: tuple[Outcome, ...] = ()
    declined: tuple[tuple[frozenset[Node], Outcome], ...] = ()
    near: tuple[Near, ...] = ()

    def nearest(self, *nodes: Node, least: float = 0.0) -> str:
        """The pattern that came nearest to matching where ``nodes`` are, and what was in its way; in words.

        ``least``: how much of it must have been found; of an author's own pattern less is enough.
        """
        enough = {True: min(least, WORTH_TELLING_ITS_AUTHOR), False: least}
        found = [n for n in self.near if n.covers & set(nodes) and n.matched >= enough[_is_own(n)]]
        best = max(found, key=lambda n: (n.refuted, n.matched), default=None)
        return diagnosis(best) if best is not None else ""

    def declining(self, node: Node) -> Outcome | None:
        """The place that a pattern leaves as it is and that ``node`` is a part of."""
        return next((outcome for nodes, outcome in self.declined if node in nodes), None)

    def declined_elsewhere(self, known: Set[Node]) -> tuple[Outcome, ...]:
        """Places that a pattern leaves as they are, and that are no candidate of the engine's."""
        return tuple(outcome for nodes, outcome in self.declined if not nodes & known)

    def refuted_elsewhere(self, known: Set[Node]) -> tuple[Outcome, ...]:
        """Places of a pattern that were found and not proved, and that are no candidate of the engine's."""
        return tuple(
            Outcome(
                "missed",
                near.root.name,
                source_line(near.root),
                reasons=(Reason(near.text, "pattern", near.root.name, source_line(near.root)),),
                details={"pattern": near.pattern.name},
            )
            for near in self.near
            if near.refuted and not near.covers & known
        )


def _is_own(near: Near) -> bool:
    """Whether it is a pattern of an author's own, and not of the library."""
    return not near.pattern.function.__module__.startswith("sdpa_rewrite.patterns.")


thorough: ContextVar[bool] = ContextVar("sdpa_rewrite thorough", default=False)
"""Look at places too that cannot match, since somebody reads the diagnosis."""


def apply(graph: Graph) -> Taught:
    """Rewrite every place in ``graph`` where a pattern that is on matches; tell what became of each."""
    patterns = tuple(p for p in registry.active() if not p.names_sites)
    if not patterns:
        return Taught()
    run = _Pass(graph)
    outcomes = tuple(run.run(patterns))
    return Taught(outcomes, tuple(run.declined), tuple(run.near))


class _Survey:
    """What is known of a graph as it is now, for all patterns."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.places: dict[str, list[Node]] = {}  # what may be a pattern's result, by kind
        for node in graph.nodes:
            if is_call(node) and is_tensor(node) and node.meta.get("partitioner_tag") != "is_backward":
                self.places.setdefault(kind_of(node), []).append(node)
        self._below: dict[Node, frozenset[str]] = {}
        self._openers: dict[Node, Opener] = {}

    def may_be(self, node: Node, needed: Set[str]) -> bool:
        """Whether ``node`` reads operators of all these kinds."""
        if node not in self._below:
            self._below[node] = kinds_below(node)
        return needed <= self._below[node]

    def opener(self, root: Node) -> Opener:
        """The one that all patterns open ``root`` with."""
        if root not in self._openers:
            self._openers[root] = Opener(Axes())
        return self._openers[root]


@dataclass
class _Pass:
    """One graph."""

    graph: Graph
    taken: set[Node] = field(default_factory=set)
    declined: list[tuple[frozenset[Node], Outcome]] = field(default_factory=list)
    near: list[Near] = field(default_factory=list)

    def run(self, patterns: tuple[Pattern, ...]) -> Iterator[Outcome]:
        self.survey = _Survey(self.graph)
        for pattern in patterns:
            try:
                variants = list(lifted_variants(pattern))
            except Exception as error:
                if config.strict:
                    raise
                reason = Reason(f"the pattern {pattern.name} cannot be used: {error}", "pattern")
                yield Outcome("recognised", "", "", reasons=(reason,))
                continue
            for variant in variants:
                yield from self._variant(pattern, variant)

    def _variant(self, pattern: Pattern, variant: LiftedPattern) -> Iterator[Outcome]:
        places = iter(self.survey.places.get(variant.kind, ()))
        while (found := self._next(pattern, variant, places)) is not None:
            outcome = found if isinstance(found, Outcome) else self._rewritten(pattern, *found)
            if outcome is not None:
                self.survey = _Survey(self.graph)
                yield outcome

    def _next(
        self, pattern: Pattern, variant: LiftedPattern, places: Iterator[Node]
    ) -> tuple[Region, Backward] | Outcome | None:
        """The next match among ``places``, or why looking for it failed; None where there are no more."""
        with clean_room():
            for node in places:
                if node not in self.survey.order or node in self.taken:  # rewritten meanwhile
                    continue
                if not (thorough.get() or self.survey.may_be(node, variant.needed)):
                    continue
                try:
                    found = self._search(variant, node)
                except Miss:  # the place cannot be opened: the engine tells why, where it is a candidate
                    continue
                except Exception as error:
                    if config.strict:
                        raise
                    text = f"matching failed: {type(error).__name__}: {error}"
                    return self._declined(pattern, node, Reason(text, "pattern"))
                if found is not None:
                    return found
        return None

    def _search(self, variant: LiftedPattern, root: Node) -> tuple[Region, Backward] | None:
        """The first match at ``root`` that is proved.  Where there is none, what came nearest is kept."""
        nearest: Near | None = None
        other_form = False  # a match but for a result that nobody reads: no near miss, but a smaller form
        for found in regions_at(variant, root, self.survey.opener(root), closely=thorough.get()):
            if isinstance(found, Near):
                if not other_form and (thorough.get() or found.matched >= WORTH_TELLING):
                    nearest = nearest or found
            elif found.inner & self.taken or not all(_is_read(r.node, found.inner) for r in found.roots[1:]):
                other_form = True
            else:
                try:
                    certify.forward(found)
                    return found, adjoint.backward(found, self.survey.order)
                except adjoint.Unread:
                    other_form = True
                except Miss as miss:
                    nearest = nearest or Near.disproved(found, miss)
        self.near += [nearest] if nearest is not None else []
        return None

    @staticmethod
    def _declined(pattern: Pattern, root: Node, reason: Reason, training: bool = False) -> Outcome:
        details = {"pattern": pattern.name}
        return Outcome("recognised", root.name, source_line(root), training, reasons=(reason,), details=details)

    def _rewritten(self, pattern: Pattern, region: Region, back: Backward) -> Outcome | None:
        """The outcome of a rewrite; None where the place stays as it is, which is noted."""
        root, training = region.roots[0].node, bool(back.gradients)
        name, source = root.name, source_line(root)
        try:
            veto(pattern, matched(region, back))
            if found := replace.difference(pattern, region, training):
                raise Refused(found)
            held = frozenset(region.bound)
            added = replace.put_in(self.graph, pattern, region, back, self.survey.order, held)
        except NoMatch as no:
            at = no.at
            reason = Reason(no.reason, at.name if at else "check", at.node if at else "", at.source if at else "")
            self.declined.append((region.inner, self._declined(pattern, root, reason, training)))
            return None
        except Exception as error:
            if config.strict and not isinstance(error, Refused):
                raise
            text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            reason = Reason(text, "replacement")
            self.declined.append((region.inner, self._declined(pattern, root, reason, training)))
            return None
        self.taken |= set(added)
        return Outcome(
            "fused", name, source, training, emitter=f"pattern {pattern.name}", details={"pattern": pattern.name}
        )


def _is_read(node: Node, inner: Set[Node]) -> bool:
    """Whether anything but the pattern itself, and the backward, may read a result."""
    for user in node.users:
        if user.meta.get("partitioner_tag") == "is_backward":
            continue
        same = is_call(user) and opname(user) in LAYOUT | CASTS  # the result in another form
        if _is_read(user, inner) if same else user not in inner:
            return True
    return False


def veto(pattern: Pattern, match: Match) -> None:
    """Raise ``NoMatch`` where the pattern's declarations or checks are against it."""
    if pattern.replacement is None:
        raise NoMatch(pattern.why_not or f"the pattern {pattern.name} has no replacement")
    first = next(p for p in match.parameters.values() if isinstance(p, MatchedTensor))
    if pattern.devices and first.device.type not in pattern.devices:
        raise NoMatch(f"{first.name} is on {first.device}, not on {' or '.join(pattern.devices)}", at=first)
    if pattern.dtypes and first.dtype not in pattern.dtypes:
        raise NoMatch(f"{first.name} is {first.dtype}, not {' or '.join(map(str, pattern.dtypes))}", at=first)
    for check in pattern.checks:
        _ask(check, match)


def _ask(check: Callable[[Match], None], match: Match) -> None:
    """A check that fails, or that returns something, has not said yes."""
    name = getattr(check, "__name__", "extra_check")
    answer: object = None
    try:
        answer = check(match)  # type: ignore[func-returns-value]
    except NoMatch:
        raise
    except Exception as error:
        raise NoMatch(f"the check {name} failed: {type(error).__name__}: {error}") from error
    if answer is not None:
        raise NoMatch(f"the check {name} returned {answer!r}: it raises NoMatch to say no, and returns nothing else")


def matched(region: Region, back: Backward) -> Match:
    """A region as a check sees it."""
    wanted = {c.name for c in back.gradients}
    parameters: dict[str, MatchedTensor | MatchedScalar] = {}
    for name, term in region.tensors.items():
        node = term.attr[0]
        value: Tensor = value_of(node)
        shape = tuple(product(d) for d in region.dims[name])
        parameters[name] = MatchedTensor(
            name, shape, value.dtype, value.device, name in wanted, value.is_contiguous(), node.name, source_line(node)
        )
    for name, term in region.scalars.items():
        if term.op == "number":
            parameters[name] = MatchedScalar(name, term.attr, False)
        else:
            node = term.attr[0]
            parameters[name] = MatchedScalar(name, None, name in wanted, node.name, source_line(node))
    symbols = region.pattern.symbols
    sizes = {axis: region.axes.sizes[s] for axis, s in symbols.items() if s in region.axes.sizes}
    variant: Variant = region.pattern.variant
    ordered = {p.name: parameters[p.name] for p in variant.parameters if p.name in parameters}
    return Match(ordered, sizes, variant.fixed, bool(back.gradients), source_line(region.roots[0].node))
