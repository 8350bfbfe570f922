"""The backward of a site, found in the joint graph.

Every node that reads an interior value of the forward (scores, probabilities, weights) is followed until it leaves
the N x N world.  A node whose value, on random data, is the gradient of a role is a result that the replacement
provides; everything else that still needs an interior value is an escape, and the candidate a ``Miss``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from torch.fx import Node

from sdpa_rewrite import prove
from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Size, Window, atoms_of, product, same_size, shape_of
from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.algebra.tiny import agree, can_shrink
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
    is_pointwise,
    is_tensor,
    opname,
    value_of,
)
from sdpa_rewrite.match import Candidate
from sdpa_rewrite.site import Gradient, Miss, Operand, Site

LIMIT = 400  # nodes of a backward


@dataclass
class Backward:
    """What reads interior values: dimensions of every node followed, candidate terms, and where it stopped."""

    site: Site
    lifter: Lifter
    order: dict[Node, int]
    known: dict[Node, Dims]
    inner: set[Node] = field(default_factory=set)
    joined: set[Atom] = field(default_factory=set)
    terms: dict[Node, Term | None] = field(default_factory=dict)
    outside: dict[Node, list[Node]] = field(default_factory=dict)


def complete(site: Site, lifter: Lifter, candidate: Candidate, order: dict[Node, int]) -> Site:
    """``site`` with its backward, if the graph has one.  Raises ``Miss`` for an escape, ``Refine`` to split an axis."""
    found = follow(site, lifter, candidate, order)
    if not found.terms:
        _check_escapes(found, {}, candidate)
        return site
    cotangent = _cotangent(found)
    matches: dict[Node, Gradient] = {}
    if cotangent is not None:
        operand, term = cotangent
        site = site.with_backward(operand, term, ())
        matches = _identify(site, found)
    active = _check_escapes(found, matches, candidate)
    if not active:
        return site
    return site.with_backward(*cotangent, tuple(active))  # type: ignore[misc]


def follow(site: Site, lifter: Lifter, candidate: Candidate, order: dict[Node, int]) -> Backward:
    """Walk from the interior of the forward to everything that depends on it, in graph order."""
    lifter.backward = True
    lifter.bound += [site.rows, *((a,) for a in site.batch), site.depth, site.width]
    below = _below(site.scores_node, candidate.interior)
    known = {n: d for (n, d) in reversed(lifter.memo) if n in below and not _windowed(d)}
    own = {*site.batch, *site.rows, *site.columns, *site.depth, *site.width}
    joined = {a for dims in known.values() for a in atoms_of(dims)} - own
    for node, dims in reversed(lifter.memo):  # read through a slice only: the whole runs over the joined axis
        if node in below and node not in known:
            known[node] = tuple(_whole(dim, joined) for dim in dims)
    found = Backward(site, lifter, order, known, set(below), joined)
    heap: list[tuple[int, int, Node]] = []
    queued: set[Node] = set()

    def enqueue(node: Node) -> None:
        for user in node.users:
            if user in below or user is candidate.product or opname(user) in SHAPE_READERS:
                continue
            if user not in queued:
                queued.add(user)
                heapq.heappush(heap, (order[user], len(queued), user))

    for node in below:
        enqueue(node)
    while heap:
        _, _, user = heapq.heappop(heap)
        if len(queued) > LIMIT:
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


def _below(node: Node, within: frozenset[Node]) -> set[Node]:
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


def _term(found: Backward, node: Node, dims: Dims) -> Term | None:
    """What ``node`` computes; None where it cannot be read, which keeps it from being named a gradient."""
    found.lifter.interior.add(node)
    _hint(found, node)
    try:
        return found.lifter.request(node, dims)
    except (Irregular, CannotWindow):
        return None


def _hint(found: Backward, node: Node) -> None:
    """Tell the lifter which axes ``node`` sums over: those that its input is known to have."""
    name = opname(node)
    if name in REDUCTIONS and node.args[0] in found.known:
        dims = found.known[node.args[0]]  # type: ignore[index]
        found.lifter.hints |= {(node, k): dims[k] for k in reductions.reduced_dims(node)[0]}
    elif name == "slice" and node.args[0] in found.known:
        k = int(node.args[1] if len(node.args) > 1 else 0)  # type: ignore[arg-type]
        found.lifter.hints[node, "whole"] = found.known[node.args[0]][k]  # type: ignore[index]
    elif name == "scatter" and node in found.known:
        found.lifter.hints[node, "whole"] = found.known[node][int(node.args[1])]  # type: ignore[arg-type]
    elif name in ("bmm", "mm"):
        left, right = node.args[:2]
        if left in found.known:
            found.lifter.hints[node, "k"] = found.known[left][-1]  # type: ignore[index]
        elif right in found.known:
            found.lifter.hints[node, "k"] = found.known[right][-2]  # type: ignore[index]


def _step(found: Backward, node: Node) -> Dims | None:
    """Dimensions that ``node`` may have, from those of its interior inputs; None where the walk ends."""
    if not is_call(node) or not is_tensor(node):
        return None
    name = opname(node)
    first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    try:
        if name in LAYOUT and first in found.known:
            return push(node, found.known[first], lambda k, size: _fresh(found, node, k, size))
        if name in REDUCTIONS and first in found.known:
            return _reduced(node, found.known[first])
        if name in CONTRACTIONS:
            return _contracted(found, node)
        if name == "getitem":
            return _largest(found, node)
        if name == "slice" and first in found.known:
            return _cut(found, node, found.known[first])
        if name in ("scatter", "slice_scatter", "cat", "copy") or is_pointwise(node) or name in CASTS:
            return _combined(found, node)
    except Irregular:
        return None
    return None


def _fresh(found: Backward, node: Node, position: int, size: Size, used: Dims = ()) -> Atom:
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
    out = [() if k in removed else d for k, d in enumerate(dims) if keep or k not in removed]
    return tuple(out)


def _largest(found: Backward, node: Node) -> Dims | None:
    source = node.args[0]
    if not isinstance(source, Node) or opname(source) != "max" or source.args[0] not in found.known:
        return None
    return _reduced(source, found.known[source.args[0]])  # type: ignore[index]


def _cut(found: Backward, node: Node, dims: Dims) -> Dims:
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


def _combined(found: Backward, node: Node) -> Dims | None:
    """A pointwise operator: the dimensions of its interior inputs, aligned at the right."""
    shape = shape_of(value_of(node))
    out: list[Dim] = [()] * len(shape)
    inputs = [n for n in node.all_input_nodes if n in found.known]
    for source in inputs:
        dims = found.known[source]
        for k, dim in enumerate(reversed(dims)):
            if dim and not out[-1 - k]:
                out[-1 - k] = dim
    missing = [k for k, size in enumerate(shape) if not out[k] and not same_size(size, 1)]
    if len(missing) > 1:
        return None
    if missing and opname(node) == "mul" and len(inputs) == 1:  # an outer product: a contraction over one position
        other = next((n for n in node.all_input_nodes if n not in found.known), None)
        if other is None or not _square(found, inputs[0]):
            return None
        out[missing[0]] = _free(found, node, other, shape[missing[0]], tuple(out))
        return tuple(out)
    if missing and is_pointwise(node):
        return None
    for k in missing:  # the columns of a concatenation, back from a reduction or a slice of it
        joined = next((a for a in found.joined if same_size(a.size, shape[k])), None)
        if joined is None:
            return None
        out[k] = (joined,)
    only_linear = opname(node) in CASTS or (opname(node) in ("neg", "mul", "div") and len(node.all_input_nodes) == 1)
    if not _is_square(found, tuple(out)) and not only_linear and not _row_statistic(found, tuple(out)):
        return None
    return tuple(out)


def _row_statistic(found: Backward, dims: Dims) -> bool:
    """A value per row (the softmax's own reductions), not yet an output of the backward."""
    site = found.site
    row = set(site.batch) | set(site.rows)
    return set(atoms_of(dims)) <= row


def _contracted(found: Backward, node: Node) -> Dims | None:
    """A contraction of an interior value with another tensor: dQ, dK, dV, or the gradient of a second score term."""
    if opname(node) not in ("bmm", "mm"):
        return None
    left, right = node.args[:2]
    shape = shape_of(value_of(node))
    inner = [n for n in (left, right) if n in found.known]
    if not all(_square(found, n) for n in inner):  # type: ignore[arg-type]
        return None
    if len(inner) == 2:
        return (*found.known[left][:-1], found.known[right][-1])  # type: ignore[index]
    if left in found.known:
        out = found.known[left][:-1]  # type: ignore[index]
        return (*out, _free(found, node, right, shape[-1], out))
    *batch, _, column = found.known[right]  # type: ignore[index]
    return (*batch, _free(found, node, left, shape[-2], (*batch, column)), column)


def _free(found: Backward, node: Node, other: Node, size: Size, used: Dims) -> Dim:
    """The dimension that the other operand brings: the depth of query and key, or the width of the cotangent."""
    site = found.site
    behind = other
    while is_call(behind) and (opname(behind) in LAYOUT or opname(behind) in CASTS):
        behind = behind.args[0]  # type: ignore[assignment]
    order = (site.depth, site.width) if behind in (site.query.node, site.key.node) else (site.width, site.depth)
    for dim in order:
        if same_size(product(dim), size) and not set(dim) & set(atoms_of(used)):
            return dim
    return found.lifter.axes.dim((node, "free"), size, "f")


def _cotangent(found: Backward) -> tuple[Operand, Term] | None:
    """The gradient of the output: what meets the weights, or what meets the values over their width."""
    site, terms = found.site, found.lifter.terms
    weights = next(a for a in site.result_term.args[0].args if a is not site.value_term)
    known = [t for t in found.terms.values() if t is not None]
    for term in known:
        if term.op == "reduce" and term.args[0].op == "mul" and weights in term.args[0].args:
            other = next(a for a in term.args[0].args if a is not weights)
            if other.op == "leaf" and set(site.width) <= other.axes:
                return Operand(*other.attr), other
    for term in {t: None for top in known for t in subterms(top)}:
        met = _meets_value(site, term)
        if met is None:
            continue
        renamed = terms.rename(*met)
        if renamed.axes <= {*site.batch, *site.rows, *site.width}:
            return Operand(*renamed.attr), renamed
    return None


def _meets_value(site: Site, term: Term) -> tuple[Term, dict[Atom, Atom]] | None:
    """In sum_e(g * v): g, and the renaming of the summed axes to the site's width."""
    if term.op != "reduce" or term.args[0].op != "mul":
        return None
    for value, other in (term.args[0].args, term.args[0].args[::-1]):
        if value.op != "leaf" or value.attr[0] is not site.value.node or other.op != "leaf":
            continue
        if other.attr[0] in (site.query.node, site.key.node) or len(term.attr[1]) != len(site.width):
            continue
        theirs, ours = atoms_of(value.attr[1]), atoms_of(site.value.dims)
        if len(theirs) == len(ours):
            mapping = {a: b for a, b in zip(theirs, ours, strict=True) if a in term.attr[1]}
            if set(mapping.values()) == set(site.width):
                return other, mapping
    return None


def _identify(site: Site, found: Backward) -> dict[Node, Gradient]:
    """For every node followed: the role whose gradient it is, on all draws."""
    targets: dict[str, Operand] = {"query": site.query, "key": site.key, "value": site.value}
    targets |= {c.name: c.operand for c in site.captures if value_of(c.operand.node).dtype.is_floating_point}
    pairs = [
        (node, found.known[node], term, role)
        for node, term in found.terms.items()
        for role, operand in targets.items()
        if term is not None and set(atoms_of(found.known[node])) == operand.axes
    ]
    assert site.cotangent_term is not None
    base = [site.result_term, site.cotangent_term]
    pairs = [p for p in pairs if can_shrink([*base, p[2]])]
    for seed in range(4):
        pairs = _agreeing(site, pairs, seed, special=seed >= 2)
    matches: dict[Node, Gradient] = {}
    for node, dims, _, role in pairs:
        matches.setdefault(node, Gradient(role, Operand(node, dims)))
    return matches


Pair = tuple[Node, Dims, Term, str]


def _agreeing(site: Site, pairs: list[Pair], seed: int, special: bool) -> list[Pair]:
    assert site.cotangent_term is not None
    try:
        trial = prove.draw(site, [site.cotangent_term, *(p[2] for p in pairs)], seed, special, grad=True)
        cotangent = evaluate(site.cotangent_term, trial.world)
        gradients = prove.gradients_of(trial, cotangent, sorted({p[3] for p in pairs}))
        kept = []
        for pair in pairs:
            target = gradients.get(pair[3])
            if target is not None and agree(evaluate(pair[2], trial.world), target) is None:
                kept.append(pair)
        return kept
    except prove.NOT_EVALUATED as error:
        raise Miss(f"the backward cannot be evaluated on a small instance: {error}", "backward") from error


def _check_escapes(found: Backward, matches: dict[Node, Gradient], candidate: Candidate) -> list[Gradient]:
    """The gradients that are read; raises ``Miss`` when another interior value is."""
    reached = _reached(found, matches)
    order = found.order
    problems: dict[Node, tuple[Node, Node]] = {}  # interior node -> (it or a node after it, what reads that outside)
    for node in sorted(reached, key=order.__getitem__, reverse=True):
        if node in matches and not _square(found, node):
            continue
        if node in found.outside:
            problems[node] = (node, found.outside[node][0])
            continue
        behind = next((u for u in node.users if u in problems and u not in matches), None)
        if behind is not None:
            problems[node] = problems[behind]
    for node in sorted(reached - found.terms.keys(), key=order.__getitem__):
        if node in problems:
            culprit, reader = problems[node]
            role, text = _escape(found, culprit, reader, candidate)
            raise Miss(text, role, reader)
    active = [n for n in reached if n in matches and (n in problems or not _square(found, n))]
    return [matches[n] for n in sorted(active, key=order.__getitem__)]


def _square(found: Backward, node: Node) -> bool:
    return _is_square(found, found.known[node])


def _is_square(found: Backward, dims: Dims) -> bool:
    """Rows by columns; or by the columns of a concatenation, when a sink stands beside the scores."""
    site, atoms = found.site, set(atoms_of(dims))
    if atoms & {*site.depth, *site.width}:
        return False
    return set(site.rows) <= atoms and (set(site.columns) <= atoms or bool(atoms & found.joined))


def _reached(found: Backward, matches: dict[Node, Gradient]) -> set[Node]:
    """Interior nodes up to the first gradient on each path; the gradient of a full bias may lie on the way to others."""
    reached = {n for n in found.inner if n not in found.terms}
    stack = list(reached)
    while stack:
        node = stack.pop()
        if node in matches and not _square(found, node):
            continue
        for user in node.users:
            if user in found.inner and user not in reached:
                reached.add(user)
                stack.append(user)
    return reached


def _escape(found: Backward, node: Node, reader: Node, candidate: Candidate) -> tuple[str, str]:
    what = "output" if reader.op == "output" else str(reader.target)
    if found.order[node] > found.order[candidate.product]:
        return "backward", f"a value of its backward ({node.name}) is no gradient of a role and is read by {what}"
    name = "probabilities" if found.order[node] > found.order[candidate.anchor] else "scores"
    return "escape", f"the {name} are also read by {what}"
