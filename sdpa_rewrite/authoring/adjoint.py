"""The backward of a region, found in the joint graph.

The cotangent is the tensor that meets values of the region in the backward and that the region does not make.  What
depends on it, and on nothing else that is foreign, is followed; a node whose value is autograd of the pattern is a
gradient, and the replacement provides it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Dim, Dims, Irregular, Refine, Window, atoms_of, same_size, shape_of
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.authoring.certify import Claim, gradients
from sdpa_rewrite.authoring.region import Region
from sdpa_rewrite.lift import reductions
from sdpa_rewrite.lift.layout import push
from sdpa_rewrite.lift.lifter import CannotWindow
from sdpa_rewrite.lift.ops import (
    CASTS,
    LAYOUT,
    NUMBERS,
    REDUCTIONS,
    SHAPE_READERS,
    is_call,
    is_pointwise,
    is_tensor,
    opname,
    source_line,
    value_of,
)
from sdpa_rewrite.site import Miss, Operand

LIMIT = 500  # nodes of a backward
CANDIDATES, TRIALS = 8, 24  # tensors that are tried as a cotangent; choices of cotangents for all results


class Unread(Exception):
    """A result of the pattern is a value that nobody reads: this is no place for the pattern."""


@dataclass(frozen=True)
class Backward:
    """``cotangents``: of each result, where the graph has one.  ``gradients``: of a parameter, by name."""

    cotangents: tuple[Operand | None, ...] = ()
    gradients: tuple[Claim, ...] = ()


def backward(region: Region, order: dict[Node, int]) -> Backward:
    """The gradients of ``region`` in its graph.  Raises ``Miss`` when a value of it is needed elsewhere, ``Unread``."""
    walk = _Walk(region, order)
    best: tuple[int, Backward, _Walk] | None = None
    for cotangents in itertools.islice(_cotangents(region, order, ()), TRIALS):
        if not any(cotangents):
            continue
        trial = _Walk(region, order)
        leaves = trial.follow(cotangents)
        found = trial.gradients(leaves)
        if found and (best is None or len({c.name for c in found}) > best[0]):
            operands = tuple(Operand(*leaf.attr) if leaf is not None else None for leaf in leaves)
            best = len({c.name for c in found}), Backward(operands, tuple(found)), trial
            if not trial.escapes([c.operand.node for c in found]):
                break
    followed = best[2] if best is not None else walk
    result = best[1] if best is not None else Backward((None,) * len(region.roots))
    escapes = followed.escapes([c.operand.node for c in result.gradients])
    if unread := followed.unread([c.operand.node for c in result.gradients]):
        raise Unread(unread)
    if escapes:
        node, reader = escapes[0]
        what = "output" if reader.op == "output" else f"{reader.target} at {source_line(reader) or reader.name}"
        raise Miss(f"{node.name}, a value inside the pattern, is also read by {what}", "escape", node)
    return result


def _cotangents(
    region: Region, order: dict[Node, int], chosen: tuple[Node | None, ...]
) -> Iterator[tuple[Node | None, ...]]:
    """Choices of a cotangent for each result: one may meet only what another has led to."""
    if len(chosen) == len(region.roots):
        yield chosen
        return
    walk = _Walk(region, order)
    walk.follow(chosen)
    for candidate in (*walk.candidates(region.roots[len(chosen)].node), None):
        if candidate is None or candidate not in chosen:
            yield from _cotangents(region, order, (*chosen, candidate))


@dataclass
class _Walk:
    """Dimensions of the nodes that belong to the region or are made of its values."""

    region: Region
    order: dict[Node, int]
    known: dict[Node, Dims] = field(default_factory=dict)
    followed: dict[Node, Term | None] = field(default_factory=dict)
    foreign: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        region = self.region
        for term in (*region.tensors.values(), *(t for t in region.scalars.values() if t.op == "leaf")):
            self.known.setdefault(*term.attr)
        for (node, dims), _ in region.lifter.memo.items():
            if node in region.inner and not any(isinstance(a, Window) for a in atoms_of(dims)):
                self.known.setdefault(node, dims)
        for node in sorted(region.inner, key=self.order.__getitem__):
            if node not in self.known:
                self._resolve(node)

    # -- the cotangent --------------------------------------------------------------------------------------

    def candidates(self, root: Node) -> list[Node]:
        """Foreign tensors of the result's shape that meet values of the region, first in graph order."""
        shape = shape_of(value_of(root))
        near = [n for n in self.known if n is not root]
        seen, found = set(near), []
        for node in near:  # grows while it is walked
            for user in node.users:
                if user in seen or not is_call(user) or opname(user) in SHAPE_READERS or user in self.region.inner:
                    continue
                foreign = [n for n in user.all_input_nodes if is_tensor(n) and not self._resolve(n)]
                if foreign:
                    found += [x for x in foreign for x in _spellings(x) if shape_of(value_of(x)) == shape]
                elif len(seen) < LIMIT and self._resolve(user):
                    seen.add(user)
                    near.append(user)
        later = [n for n in dict.fromkeys(found) if self.order.get(n, 0) > self.order[root]]
        early = [n for n in dict.fromkeys(found) if n.op == "placeholder"]
        return sorted([*early, *later], key=lambda n: self.order.get(n, 0))[:CANDIDATES]

    def _resolve(self, node: Node, depth: int = 8) -> bool:
        """Whether ``node`` is made of known values only; then it is known, too."""
        if node in self.known:
            return True
        if not is_call(node) or not is_tensor(node) or depth == 0 or node in self.foreign:
            return False
        if opname(node) in NUMBERS and not [n for n in node.all_input_nodes if is_tensor(n)]:
            self.known[node] = ()
            return True
        if opname(node) in NUMBERS or not _readable(node):
            return False
        sources = [n for n in node.all_input_nodes if is_tensor(n)]
        if not sources or not all(self._resolve(n, depth - 1) for n in sources):
            return False
        dims = self._dims(node)
        if dims is None:
            return False
        self.known[node] = dims
        return True

    # -- what depends on it ---------------------------------------------------------------------------------

    def gradients(self, leaves: Sequence[Term | None]) -> list[Claim]:
        """The gradients among what was followed, for the ``leaves`` of the cotangents."""
        return _first(gradients(self.region, leaves, list(self._claims())), self.order)

    def follow(self, cotangents: Sequence[Node | None]) -> list[Term | None]:
        """Read what depends on ``cotangents`` and on nothing else that is foreign; the leaves of the cotangents."""
        region, lifter = self.region, self.region.lifter
        leaves: list[Term | None] = []
        queued: set[Node] = set()
        for cotangent, root in zip(cotangents, region.roots, strict=False):
            if cotangent is None:
                leaves.append(None)
                continue
            leaf = lifter.operand(cotangent, root.dims)  # behind its layout, where all its readers meet
            leaves.append(leaf)
            self.known.update({cotangent: root.dims, leaf.attr[0]: leaf.attr[1]})
            queued |= {u for n in (cotangent, leaf.attr[0]) for u in n.users} - {cotangent}
        heap = [(self.order[u], u.name, u) for u in queued]
        heapq.heapify(heap)
        while heap and len(queued) < LIMIT:
            _, _, node = heapq.heappop(heap)
            if not is_call(node) or not is_tensor(node) or not _readable(node):
                continue
            if not all(self._resolve(n) for n in node.all_input_nodes if is_tensor(n)):
                continue
            dims = self._dims(node)
            if dims is None:
                continue
            self.known[node] = dims
            self.followed[node] = self._term(node, dims)
            for user in node.users:
                if user not in queued:
                    queued.add(user)
                    heapq.heappush(heap, (self.order[user], user.name, user))
        return leaves

    def _claims(self) -> Iterator[Claim]:
        region = self.region
        full = {n: frozenset(atoms_of(region.dims[n])) for n in region.tensors}
        full |= {n: frozenset() for n, t in region.scalars.items() if t.op == "leaf"}
        least = {n: t.axes for n, t in region.tensors.items()} | {n: frozenset() for n in region.scalars}
        for node, term in self.followed.items():
            if term is None or any(isinstance(a, Window) for a in atoms_of(self.known[node])):
                continue
            axes = frozenset(atoms_of(self.known[node]))
            for name, widest in full.items():
                if least[name] <= axes <= widest:
                    yield Claim(name, Operand(node, self.known[node]), term)

    def _term(self, node: Node, dims: Dims) -> Term | None:
        lifter = self.region.lifter
        lifter.interior.add(node)
        lifter.backward = True
        try:
            return lifter.request(node, dims)
        except (Irregular, CannotWindow, Refine):
            return None

    # -- dimensions -----------------------------------------------------------------------------------------

    def _dims(self, node: Node) -> Dims | None:
        name, known = opname(node), self.known
        first: Any = node.args[0] if node.args else None
        self.region.lifter.interior.add(node)
        try:
            if name in LAYOUT and first in known:
                return push(node, known[first], lambda k, size: self._fresh(node, k, size))
            if name in REDUCTIONS and first in known:
                return self._reduced(node, known[first])
            if name in ("bmm", "mm"):
                return self._contracted(node)
            if name in CASTS or is_pointwise(node):
                return self._combined(node)
        except (Irregular, Refine):
            return None
        return None

    def _fresh(self, node: Node, position: int, size: Any) -> Any:
        dim = self.region.lifter.axes.dim((node, position, "fresh"), size, "f")
        if len(dim) != 1:
            raise Irregular("a new axis was split")
        return dim[0]

    def _reduced(self, node: Node, dims: Dims) -> Dims:
        removed, keep = reductions.reduced_dims(node)
        self.region.lifter.hints.update({(node, k): dims[k] for k in removed})
        return tuple(() if k in removed else d for k, d in enumerate(dims) if keep or k not in removed)

    def _contracted(self, node: Node) -> Dims | None:
        left, right = (self.known[n] for n in node.args[:2] if isinstance(n, Node))
        hints = self.region.lifter.hints
        hints[node, "k"] = left[-1]
        out = (*left[:-1], right[-1])
        batch = zip(left[:-2], right[:-2], strict=True)
        merged: tuple[Dim, ...] = tuple(a or b for a, b in batch)
        return (*merged, *out[-2:])

    def _combined(self, node: Node) -> Dims | None:
        shape = shape_of(value_of(node))
        out: list[Dim] = [()] * len(shape)
        for source in node.all_input_nodes:
            if not is_tensor(source):
                continue
            for k, dim in enumerate(reversed(self.known[source])):
                if dim and not out[-1 - k]:
                    out[-1 - k] = dim
        if any(not d and not same_size(n, 1) for d, n in zip(out, shape, strict=True)):
            return None
        return tuple(out)

    # -- who else reads the region --------------------------------------------------------------------------

    def escapes(self, provided: Iterable[Node]) -> list[tuple[Node, Node]]:
        """Values worth not computing that somebody else needs, each with its reader."""
        core, results = self.region.core(), {r.node for r in self.region.roots}
        alive = self._alive(results | set(provided))
        held = sorted((n for n in alive if n in core), key=lambda n: self.order.get(n, 0))
        return [(n, alive[n]) for n in held if not results.intersection(_behind(n))]  # a result's cast is made of it

    def unread(self, provided: Iterable[Node]) -> Node | None:
        """A further result of the pattern that nobody outside reads."""
        first, *others = (r.node for r in self.region.roots)
        replaced = {first, *others, *provided}
        return next((n for n in others if n not in self._alive(replaced - {n})), None)

    def _alive(self, replaced: set[Node]) -> dict[Node, Node]:
        """Values that are needed when those ``replaced`` are not, each with who needs it in the end."""
        inside = (self.region.inner | set(self.followed) | set(self.known)) - set(self.region.bound)
        alive: dict[Node, Node] = {}
        for node in sorted(inside - replaced, key=lambda n: self.order.get(n, 0), reverse=True):
            for user in node.users:
                if opname(user) not in SHAPE_READERS and (user not in inside or user in alive):
                    alive[node] = alive.get(user, user)
                    break
        return alive


def _readable(node: Node) -> bool:
    name = opname(node)
    return name in LAYOUT or name in CASTS or name in REDUCTIONS or name in ("bmm", "mm") or is_pointwise(node)


def _spellings(node: Node) -> list[Node]:
    """``node``, and what it is a view, a cast or a multiple of."""
    found = [node]
    while is_call(node) and len(found) < 4:
        inputs = [n for n in node.all_input_nodes if is_tensor(n)]
        if len(inputs) != 1 or not (opname(node) in LAYOUT or opname(node) in CASTS or opname(node) in ("mul", "neg")):
            break
        node = inputs[0]
        found.append(node)
    return found


def _first(claims: list[Claim], order: dict[Node, int]) -> list[Claim]:
    """Of a gradient and its views, the gradient."""
    kept: dict[Node, Claim] = {}
    for claim in sorted(claims, key=lambda c: order[c.operand.node]):
        node = claim.operand.node
        if node in kept or any(n in kept for n in _behind(node)):
            continue
        kept[node] = claim
    return list(kept.values())


def _behind(node: Node) -> Iterator[Node]:
    while is_call(node) and (opname(node) in LAYOUT or opname(node) in CASTS):
        node = node.args[0]  # type: ignore[assignment]
        yield node
