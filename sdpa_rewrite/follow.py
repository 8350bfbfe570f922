"""Everything that reads interior values of an attention, followed to where it leaves the N x N world.

The walk goes forward in the graph, from the scores to whatever depends on them: the forward's own nodes, then the
backward's.  Each node gets named axes from its interior inputs, and then a term, read like the forward's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Size, Window, atoms_of, product, same_size, shape_of
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.lift import reductions
from sdpa_rewrite.lift.layout import push
from sdpa_rewrite.lift.lifter import CannotWindow, Lifter
from sdpa_rewrite.lift.ops import (
    CASTS,
    CONTRACTIONS,
    LAYOUT,
    REDUCTIONS,
    SHAPE_READERS,
    is_call,
    is_drawn_mask,
    is_pointwise,
    is_tensor,
    opname,
    value_of,
)
from sdpa_rewrite.match import Candidate
from sdpa_rewrite.site import Miss, Site

LIMIT = 400  # nodes of a backward
COMBINED = frozenset({"scatter", "slice_scatter", "cat", "copy"}) | CASTS  # dimensions of the inputs, as for pointwise


@dataclass
class Followed:
    """What reads interior values: dimensions of every node followed, its term, and who reads it without being followed.

    ``inner``: all nodes whose value is interior; those with an entry in ``terms`` come after the forward's own.
    ``joined``: axes of concatenations, which stand for the columns when a sink stands beside the scores.
    """

    site: Site
    lifter: Lifter
    order: dict[Node, int]
    known: dict[Node, Dims]
    inner: set[Node]
    joined: set[Atom]
    terms: dict[Node, Term | None] = field(default_factory=dict)
    outside: dict[Node, list[Node]] = field(default_factory=dict)

    def square(self, node: Node) -> bool:
        """Whether ``node`` has a value for every pair of a row and a column."""
        return self.is_square(self.known[node])

    def is_square(self, dims: Dims) -> bool:
        """Rows by columns; or by the columns of a concatenation, when a sink stands beside the scores."""
        site, atoms = self.site, set(atoms_of(dims))
        if atoms & {*site.depth, *site.width}:
            return False
        return set(site.rows) <= atoms and (set(site.columns) <= atoms or bool(atoms & self.joined))


def follow(site: Site, lifter: Lifter, candidate: Candidate, order: dict[Node, int]) -> Followed:
    """Walk from the interior of the forward to everything that depends on it, in graph order.

    Raises ``Miss`` when there is no end to it, ``Refine`` to split an axis.
    """
    lifter.backward = True
    lifter.bound += [site.rows, *((a,) for a in site.batch), site.depth, site.width]
    found = _start(site, lifter, candidate, order)
    heap: list[tuple[int, int, Node]] = []
    queued: set[Node] = set(found.inner) | {candidate.product}

    def enqueue(node: Node) -> None:
        for user in node.users:
            if user not in queued and opname(user) not in SHAPE_READERS and not is_drawn_mask(user):
                queued.add(user)
                heapq.heappush(heap, (order[user], len(queued), user))

    for node in list(found.inner):
        enqueue(node)
    limit = len(queued) + LIMIT
    while heap:
        _, _, user = heapq.heappop(heap)
        if len(queued) > limit:
            raise Miss("too many nodes read the interior of this attention", "backward", user)
        dims = _step(found, user)
        if dims is None:
            for source in user.all_input_nodes:
                if source in found.inner:
                    found.outside.setdefault(source, []).append(user)
            continue
        found.inner.add(user)
        found.known[user] = dims
        found.terms[user] = _term(found, user, dims)
        enqueue(user)
    return found


def _start(site: Site, lifter: Lifter, candidate: Candidate, order: dict[Node, int]) -> Followed:
    """The forward's own interior: the nodes that depend on the scores, with the dimensions they were read in."""
    below = descendants(site.scores_node, candidate.interior)
    known = {n: d for (n, d) in reversed(lifter.memo) if n in below and not _windowed(d)}
    own = {*site.batch, *site.rows, *site.columns, *site.depth, *site.width}
    joined = {a for dims in known.values() for a in atoms_of(dims)} - own
    for node, dims in reversed(lifter.memo):  # read through a slice only: the whole runs over the joined axis
        if node in below and node not in known:
            known[node] = tuple(_whole(dim, joined) for dim in dims)
    return Followed(site, lifter, order, known, below, joined)


def descendants(node: Node, within: frozenset[Node]) -> set[Node]:
    """``node`` and what depends on it, inside ``within``."""
    out, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in within and user not in out:
                out.add(user)
                stack.append(user)
    return out


def _whole(dim: Dim, joined: set[Atom]) -> Dim:
    if len(dim) == 1 and isinstance(dim[0], Window):
        return next(((a,) for a in joined if same_size(a.size, dim[0].size)), dim)
    return dim


def _windowed(dims: Dims) -> bool:
    return any(isinstance(a, Window) for a in atoms_of(dims))


def _term(found: Followed, node: Node, dims: Dims) -> Term | None:
    """What ``node`` computes; None where it cannot be read, which keeps it from being named a gradient."""
    found.lifter.interior.add(node)
    _hint(found, node)
    try:
        return found.lifter.request(node, dims)
    except (Irregular, CannotWindow):
        return None


def _hint(found: Followed, node: Node) -> None:
    """Tell the lifter which axes ``node`` sums over or reads one position of: those that its input is known to have."""
    name, known, hints = opname(node), found.known, found.lifter.hints
    first: Any = node.args[0]
    if name in REDUCTIONS and first in known:
        hints.update({(node, k): known[first][k] for k in reductions.reduced_dims(node)[0]})
    elif name == "slice" and first in known:
        hints[node, "whole"] = known[first][_int(node, 1)]
    elif name == "scatter":
        hints[node, "whole"] = known[node][_int(node, 1)]
    elif name in ("bmm", "mm"):
        other: Any = node.args[1]
        if first in known:
            hints[node, "k"] = known[first][-1]
        elif other in known:
            hints[node, "k"] = known[other][-2]


def _int(node: Node, position: int) -> int:
    value = node.args[position] if len(node.args) > position else 0
    return value if isinstance(value, int) else 0


def _step(found: Followed, node: Node) -> Dims | None:
    """Dimensions that ``node`` may have, from those of its interior inputs; None where the walk ends."""
    if not is_call(node) or not is_tensor(node):
        return None
    name = opname(node)
    first: Any = node.args[0] if node.args else None
    try:
        if name in LAYOUT and first in found.known:
            return push(node, found.known[first], lambda k, size: _fresh(found, node, k, size))
        if name in REDUCTIONS and first in found.known:
            return _reduced(node, found.known[first])
        if name in CONTRACTIONS:
            return _contracted(found, node)
        if name == "getitem":
            return _largest(found, first)
        if name == "slice" and first in found.known:
            return _cut(found, node, found.known[first])
        if name in COMBINED or is_pointwise(node):
            return _combined(found, node)
    except Irregular:
        return None
    return None


def _fresh(found: Followed, node: Node, position: int, size: Size, used: Dims = ()) -> Atom:
    """An axis for a dimension that no interior input has: a known axis of that size, or a new one."""
    taken = set(atoms_of(used))
    for dims in found.known.values():
        for atom in atoms_of(dims):
            if atom not in taken and same_size(atom.size, size):
                return atom
    dim = found.lifter.axes.dim((node, position, "fresh"), size, "f")
    if len(dim) != 1:
        raise Irregular("a new axis was split")
    return dim[0]


def _reduced(node: Node, dims: Dims) -> Dims:
    removed, keep = reductions.reduced_dims(node)
    return tuple(() if k in removed else d for k, d in enumerate(dims) if keep or k not in removed)


def _largest(found: Followed, source: Any) -> Dims | None:
    """getitem(max(x, dim), 0 or 1)"""
    if opname(source) != "max" or source.args[0] not in found.known:
        return None
    return _reduced(source, found.known[source.args[0]])


def _cut(found: Followed, node: Node, dims: Dims) -> Dims:
    """A slice: the keys where the size fits, else a new axis."""
    out: list[Dim] = []
    before = shape_of(value_of(node.args[0]))
    for k, (dim, size, whole) in enumerate(zip(dims, shape_of(value_of(node)), before, strict=True)):
        if same_size(size, whole):
            out.append(dim)
        elif same_size(size, 1):
            out.append(())
        elif same_size(product(found.site.columns), size):
            out.append(found.site.columns)
        else:
            out.append((_fresh(found, node, k, size, (*out, *dims[k + 1 :])),))
    return tuple(out)


def _combined(found: Followed, node: Node) -> Dims | None:
    """A pointwise operator: the dimensions of its interior inputs, aligned at the right."""
    shape = shape_of(value_of(node))
    out: list[Dim] = [()] * len(shape)
    inputs = [n for n in node.all_input_nodes if n in found.known]
    for source in inputs:
        for k, dim in enumerate(reversed(found.known[source])):
            if dim and not out[-1 - k]:
                out[-1 - k] = dim
    for k, dim in enumerate(out):  # put into a larger tensor: the concatenation with a sink, else not of this world
        if dim and not same_size(product(dim), shape[k]):
            fits = next(((a,) for a in found.joined if same_size(a.size, shape[k])), None)
            if fits is None:
                return None
            out[k] = fits
    missing = [k for k, size in enumerate(shape) if not out[k] and not same_size(size, 1)]
    if len(missing) > 1:
        return None
    other = next((n for n in node.all_input_nodes if n not in found.known), None)
    if missing and opname(node) == "mul" and other is not None and len(inputs) == 1 and found.square(inputs[0]):
        # an outer product: a contraction over one position
        out[missing[0]] = _free(found, node, other, shape[missing[0]], tuple(out))
        return tuple(out)
    for k in missing:  # a value per row meets a tensor of rows and columns, or of the columns of a concatenation
        joined: list[Dim] = [(a,) for a in found.joined if not is_pointwise(node)]
        dim = next((d for d in (*joined, found.site.columns) if d and same_size(product(d), shape[k])), ())
        if not dim or set(dim) & set(atoms_of(tuple(out))):
            return None
        out[k] = dim
    return tuple(out) if found.is_square(tuple(out)) or _linear(node) or _row_statistic(found, tuple(out)) else None


def _linear(node: Node) -> bool:
    """A gradient stays the gradient of something when it is cast, negated or multiplied by a number."""
    return opname(node) in CASTS or (opname(node) in ("neg", "mul", "div") and len(node.all_input_nodes) == 1)


def _row_statistic(found: Followed, dims: Dims) -> bool:
    """A value per row (the softmax's own reductions), not yet an output of the backward."""
    return set(atoms_of(dims)) <= {*found.site.batch, *found.site.rows}


def _contracted(found: Followed, node: Node) -> Dims | None:
    """A contraction of an interior value with another tensor: dQ, dK, dV, or the gradient of a second score term."""
    if opname(node) not in ("bmm", "mm"):
        return None
    left, right = (n for n in node.args[:2] if isinstance(n, Node))
    shape, known = shape_of(value_of(node)), found.known
    if not all(found.square(n) for n in (left, right) if n in known):
        return None
    if left in known and right in known:
        return (*known[left][:-1], known[right][-1])
    if left in known:
        out = known[left][:-1]
        return (*out, _free(found, node, right, shape[-1], out))
    *batch, _, column = known[right]
    return (*batch, _free(found, node, left, shape[-2], (*batch, column)), column)


def _free(found: Followed, node: Node, other: Node, size: Size, used: Dims) -> Dim:
    """The dimension that the other operand brings: the depth of query and key, or the width of the cotangent."""
    site = found.site
    ours = (site.query.node, site.key.node)
    behind: Any = other
    while behind not in ours and is_call(behind) and (opname(behind) in LAYOUT or opname(behind) in CASTS):
        behind = behind.args[0]
    order = (site.depth, site.width) if behind in ours else (site.width, site.depth)
    for dim in order:
        if same_size(product(dim), size) and not set(dim) & set(atoms_of(used)):
            return dim
    return found.lifter.axes.dim((node, "free"), size, "f")
