"""The part of a graph that a pattern matched: from the tensors it reads to its results, as terms over named axes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sympy
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dims, Irregular, Refine
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.authoring.correspond import Correspondence, Unlike, correspondence
from sdpa_rewrite.authoring.found import Found, may_equal
from sdpa_rewrite.authoring.lifted import LiftedPattern, dims_of, head, kind_of
from sdpa_rewrite.authoring.opener import Again, Opener
from sdpa_rewrite.authoring.program import Body, body
from sdpa_rewrite.authoring.relation import same_everywhere
from sdpa_rewrite.authoring.unify import Unifier
from sdpa_rewrite.lift.lifter import CannotWindow, Lifter
from sdpa_rewrite.lift.ops import CONTRACTIONS, is_call, is_tensor, opname
from sdpa_rewrite.site import Miss, Operand

ATTEMPTS = 24  # bindings that are looked at more closely, of one place
LARGEST = 600  # nodes of a region


@dataclass(frozen=True, eq=False)
class Region:
    """One place where a pattern matches.

    ``tensors``: what each tensor parameter is, and each tensor that a program reads; ``dims``: the graph's axes of each
    dimension that the pattern declares for it.  ``scalars``: a number's term, or a 0-d tensor's.  ``inner``: the nodes
    that the pattern covers; ``roots``: the results among them, and ``terms`` what these compute.
    """

    pattern: LiftedPattern
    axes: Correspondence
    lifter: Lifter
    tensors: dict[str, Term]
    dims: dict[str, Dims]
    scalars: dict[str, Term]
    programs: dict[str, Body]
    inner: frozenset[Node]
    roots: tuple[Operand, ...]
    terms: tuple[Term, ...]

    def operand(self, name: str) -> Operand:
        """The graph's tensor of a parameter."""
        return Operand(*self.tensors[name].attr)

    @property
    def bound(self) -> tuple[Node, ...]:
        """The nodes that the pattern reads."""
        held = [*self.tensors.values(), *(t for t in self.scalars.values() if t.op == "leaf")]
        return tuple(dict.fromkeys(t.attr[0] for t in held))

    def core(self) -> frozenset[Node]:
        """The nodes that are worth not computing: those that depend on a contraction of the region."""
        found: set[Node] = set()
        for node in self._in_order():
            if opname(node) in CONTRACTIONS or any(n in found for n in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    def _in_order(self) -> Iterator[Node]:
        graph = self.roots[0].node.graph
        yield from (n for n in graph.nodes if n in self.inner)


@dataclass(frozen=True)
class Near:
    """A place where a pattern does not match, or not quite.

    ``covers``: the nodes that were looked at; ``matched``: the part of the pattern's operators and parameters that
    something was found for.  ``text``: what is in the way, between ``expected`` (in the pattern) and ``got``, where it
    is one operator.  ``here`` and ``there``: the nodes of the pattern and of the graph that it is about.
    ``refuted``: all was found, and the proof or the backward is against it.
    """

    pattern: LiftedPattern
    root: Node
    covers: frozenset[Node]
    matched: float
    text: str
    here: tuple[Node, ...]
    there: tuple[Node, ...]
    expected: Term | None = None
    got: Term | None = None
    refuted: bool = False

    @staticmethod
    def disproved(region: Region, miss: Miss) -> Near:
        """All was found, and ``miss`` says what is wrong with it."""
        root = region.roots[0].node
        results = tuple(map(head, region.pattern.results))
        at = miss.node or root
        return Near(region.pattern, root, region.inner, 1.0, miss.text, results, (at,), refuted=True)


def regions_at(pattern: LiftedPattern, root: Node, opener: Opener, closely: bool = False) -> Iterator[Region | Near]:
    """Every way in which ``pattern`` matches at ``root``; at last, if none was taken, why there are no others.

    ``opener``: of this place, for all patterns.  ``closely``: where an operator differs, what is below it counts all
    the same, since somebody reads how much is.
    """
    opener = opener.afresh()
    seen: set[tuple[tuple[str, Node | str], ...]] = set()
    while True:
        try:
            yield from _regions(pattern, root, opener, seen, closely)
            return
        except Again as again:
            opener = again.opener
        except Refine as refine:
            opener = opener.after(refine)
        except Irregular:  # a complex, sparse or nested tensor
            return


def _regions(
    pattern: LiftedPattern, root: Node, opener: Opener, seen: set[tuple[tuple[str, Node | str], ...]], closely: bool
) -> Iterator[Region | Near]:
    top = opener.request(root, dims_of(opener.axes, root))
    unifier = Unifier(pattern.opener, pattern.parameters, pattern.roots, opener)
    unlike: Unlike | None = None
    for k, (found, tops) in enumerate(_all_results(unifier, top)):
        if k >= ATTEMPTS:
            break
        key = tuple((str(p.attr[0]), g.attr[0]) for p, g in found.leaves)
        key = (*key, *((n, str(t)) for n, t in found.scalars.items()), *(("result", t.attr[0]) for t in tops[1:]))
        if key in seen:
            continue
        try:
            made = _region(pattern, found, tops, opener)
        except Unlike as error:
            unlike = unlike or error
            continue
        seen.add(key)
        yield made
    yield _near(unifier, pattern, root, unlike, closely)


def _near(unifier: Unifier, pattern: LiftedPattern, root: Node, unlike: Unlike | None, closely: bool) -> Near:
    """Where all operators were found, what does not fit together; else where the search ended."""
    obstacle = unifier.obstacle
    if unlike is None and obstacle is not None:
        at = obstacle.place
        matched = (obstacle.matched + (unifier.passing_over(obstacle) if closely else 0)) / size(pattern)
        covers = frozenset(unifier.graph.looked_at())
        return Near(pattern, root, covers, matched, obstacle.text, at.here, at.there, at.expected, at.got)
    covers = frozenset(unifier.graph.looked_at())
    if unlike is not None and unlike.place is not None:
        return Near(pattern, root, covers, 1.0, str(unlike), unlike.place.here, unlike.place.there)
    text = str(unlike) if unlike is not None else "nothing else like it is here"
    return Near(pattern, root, covers, 1.0, text, tuple(map(head, pattern.results)), (root,))


@functools.lru_cache(maxsize=512)
def size(pattern: LiftedPattern) -> int:
    """How many operators and parameters are found where all of a pattern is."""
    unifier = Unifier(pattern.opener, pattern.parameters, pattern.roots, pattern.opener)
    found = Found()
    for root in pattern.roots:
        found = next(unifier.unify(root, root, found), found)  # none where it cannot be read
    return found.size


def _all_results(unifier: Unifier, top: Term) -> Iterator[tuple[Found, tuple[Term, ...]]]:
    """Matches of the first result at ``top``, and of the others wherever they are near it."""
    first, *others = unifier.roots

    def rest(found: Found, tops: tuple[Term, ...], left: list[Term]) -> Iterator[tuple[Found, tuple[Term, ...]]]:
        if not left:
            yield found, tops
            return
        for node in _candidates(found, top.attr[0], left[0].attr[0]):
            there = unifier.graph.request(node, dims_of(unifier.graph.axes, node))
            if there.op == "leaf":
                for more in unifier.unify(left[0], there, found):
                    yield from rest(more, (*tops, there), left[1:])

    for found in unifier.unify(first, top, Found()):
        yield from rest(found, (top,), others)


def _candidates(found: Found, root: Node, like: Node) -> list[Node]:
    """Nodes that may be another result: of its kind, made of the tensors that the first result is made of."""
    bound = list(dict.fromkeys(g.attr[0] for _, g in found.leaves))
    seen, queue = dict.fromkeys(bound), list(bound)
    while queue and len(seen) < LARGEST:
        for user in queue.pop(0).users:
            if user not in seen and is_call(user) and user.meta.get("partitioner_tag") != "is_backward":
                seen[user] = None
                queue.append(user)
    kind = kind_of(head(like))
    return [n for n in seen if n is not root and is_call(n) and is_tensor(n) and kind_of(n) == kind]


def _region(pattern: LiftedPattern, found: Found, tops: Sequence[Term], opener: Opener) -> Region:
    """The region that the bindings imply.  Raises ``Unlike``, or ``Again``."""
    axes = correspondence(found, tops, pattern)
    for pair in found.numbers:
        if not equal(axes.number(pair.mine), pair.theirs):
            raise Unlike(f"the number {pair.theirs} where the pattern has {axes.number(pair.mine)}", pair.place)
    for related in found.relations:
        if not same_everywhere(related.mine, related.theirs, related.negated, axes):
            raise Unlike(f"the positions {related.theirs} where the pattern has {related.mine}", related.place)
    names = {p.attr[0]: pattern.parameters[p.attr[0]].name for p, _ in found.leaves}
    tensors: dict[str, Term] = {}
    dims: dict[str, Dims] = {}
    for p, g in found.leaves:
        tensors.setdefault(names[p.attr[0]], opener.terms.rename(g, axes.merged))
        dims.setdefault(names[p.attr[0]], tuple(axes.dim(d) for d in p.attr[1]))
    try:
        programs = {name: body(opener, name, *ends) for name, ends in found.programs.items()}
    except Refine as refine:
        raise Again(opener.after(refine)) from refine
    for program in programs.values():
        tensors.update(program.captures)
        dims.update((name, term.attr[1]) for name, term in program.captures.items())
    roots = tuple(Operand(*opener.terms.rename(top, axes.merged).attr) for top in tops)
    bound = {t.attr[0] for t in (*tensors.values(), *found.scalars.values()) if t.op == "leaf"}
    inner = frozenset(n for root in roots for n in _between(root.node, bound))
    lifter = Lifter(opener.axes, set(inner))
    lifter.terms = opener.terms
    lifter.hints.update({key: tuple(axes.merged.get(a, a) for a in dim) for key, dim in opener.hints.items()})
    lifter.close(bound)
    try:
        terms = tuple(lifter.request(root.node, root.dims) for root in roots)
    except (Irregular, CannotWindow) as error:
        raise Unlike(f"it cannot be written in named axes: {error}") from error
    except Refine as refine:
        raise Again(opener.after(refine)) from refine
    return Region(pattern, axes, lifter, tensors, dims, dict(found.scalars), programs, inner, roots, terms)


def _between(root: Node, bound: set[Node]) -> frozenset[Node]:
    """The nodes that ``root`` depends on, up to ``bound``.  Raises ``Unlike`` where there is no end to them."""
    inner: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in inner or node in bound or not is_call(node):
            continue
        inner.add(node)
        if len(inner) > LARGEST:
            raise Unlike("it reads more of the graph than the pattern")
        stack.extend(n for n in node.all_input_nodes if is_tensor(n) or not isinstance(n.meta.get("val"), (int, float)))
    return frozenset(n for n in inner if is_tensor(n) or isinstance(n.meta.get("val"), (tuple, list)))


def equal(a: object, b: object) -> bool:
    """Whether two numbers, symbolic or not, are equal but for rounding."""
    x, y = sympy.sympify(a), sympy.sympify(b)
    symbols = sorted(x.free_symbols | y.free_symbols, key=str)
    for trial in range(3):  # equal expressions are equal at a few odd sizes
        values = {s: sympy.Integer(17 + 12 * k + 31 * trial) for k, s in enumerate(symbols)}
        one, other = (sympy.N(e.xreplace(values)) for e in (x, y))
        if one.free_symbols or other.free_symbols or not may_equal(float(one), float(other)):
            return False
        if not symbols:
            break
    return True


def summed(terms: Iterable[Term]) -> frozenset[Atom]:
    """All axes that the reductions in ``terms`` run over."""
    return frozenset(a for term in terms for t in subterms(term) if t.op == "reduce" for a in t.attr[1])
