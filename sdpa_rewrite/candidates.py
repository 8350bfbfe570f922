"""Where an attention may be: a softmax between two contractions.  Linear in the graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from sdpa_rewrite.lift.ops import (
    CASTS,
    CONTRACTIONS,
    LAYOUT,
    PIECEWISE,
    SHAPE_READERS,
    SOFTMAXES,
    SPLITS,
    is_call,
    is_drawn_mask,
    is_pointwise,
    is_tensor,
    opname,
    rank,
)

TUPLES = SPLITS | {"max", "native_dropout"}  # operators of several results that are read through
REACH = 400  # nodes looked at on each side of a softmax
BARRIERS = frozenset({"convolution", "embedding", "native_layer_norm", "native_group_norm", "_native_batch_norm_legit"})


@dataclass(frozen=True)
class Candidate:
    """A softmax between two contractions.  ``weights`` is the operand of ``product`` that it reaches."""

    anchor: Node
    product: Node
    weights_at: int
    interior: frozenset[Node]
    scores: tuple[Node, ...]
    before: frozenset[Node] = field(default=frozenset(), repr=False)  # nodes looked at on the way to the scores

    @property
    def weights(self) -> Node:
        """The operand of the product that the softmax reaches."""
        return self.product.args[self.weights_at]  # type: ignore[return-value]

    @property
    def values(self) -> Node:
        """The other operand of the product."""
        first = 1 if opname(self.product) in ("baddbmm", "addmm") else 0
        return self.product.args[2 * first + 1 - self.weights_at]  # type: ignore[return-value]


def candidates(graph: Graph) -> Iterator[Candidate]:
    """Every exponential or softmax that has a contraction before it and one after it.  Linear in the graph."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    taken: set[tuple[Node, int]] = set()
    for node in graph.nodes:
        if not is_call(node) or not _normalised(node):
            continue
        if _backward(node) and not _backward(_behind_layout(node.args[0])):
            continue  # the backward of log_softmax makes probabilities of the forward's result: attention's or a loss's
        found = _product_after(node, order)
        if found is None or found in taken:
            continue
        product, at = found
        if _backward(product) and not _backward(node):
            continue  # the forward multiplies no values by it: a router or a loss, met by its own gradient
        region, scores = _region(product.args[at], rank(product), order[product])  # type: ignore[arg-type]
        if not scores or node not in region:
            continue
        interior = _between(region, scores, order)
        if node not in interior:
            continue
        taken.add(found)
        first = tuple(sorted(scores, key=order.__getitem__))
        yield Candidate(node, product, at, frozenset(interior), first, frozenset(region))


def _backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"  # AOTAutograd's mark, where it makes one


def _normalised(node: Node) -> bool:
    """A softmax, or an exponential that is summed up or that has the logarithm of a sum taken off its exponent."""
    if opname(node) in SOFTMAXES:
        return True
    if opname(node) not in ("exp", "exp2"):
        return False
    stack, seen = list(node.users), set(node.users)
    while stack:
        user = stack.pop()
        if opname(user) == "sum":
            return True
        if opname(user) in LAYOUT or opname(user) in CASTS:
            fresh = [u for u in user.users if u not in seen]
            seen.update(fresh)
            stack.extend(fresh)
    exponent = _behind_layout(node.args[0])  # type: ignore[arg-type]
    if not isinstance(exponent, Node) or opname(exponent) not in ("sub", "add"):
        return False
    return any(opname(_behind_layout(a)) in ("log", "logsumexp") for a in exponent.all_input_nodes)


def _behind_layout(node: Node) -> Node:
    while is_call(node) and (opname(node) in LAYOUT or opname(node) in CASTS):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_glue(node: Node) -> bool:
    """Whether a softmax is followed through ``node``."""
    name = opname(node)
    if name == "getitem":
        return opname(node.args[0]) in TUPLES - {"max"} and not is_drawn_mask(node)  # type: ignore[arg-type]
    return name in LAYOUT or name in PIECEWISE or name in TUPLES - {"max"} or is_pointwise(node)


def _product_after(anchor: Node, order: dict[Node, int]) -> tuple[Node, int] | None:
    """The first contraction that ``anchor`` reaches through pointwise and layout operators, and at which operand."""
    seen, queue = {anchor}, deque([anchor])
    best: tuple[Node, int] | None = None
    while queue and len(seen) < REACH:
        node = queue.popleft()
        for user in node.users:
            if not is_call(user) or user in seen:
                continue
            if opname(user) in CONTRACTIONS:
                offset = 1 if opname(user) in ("baddbmm", "addmm") else 0
                for at in (offset, offset + 1):
                    if user.args[at] is node and (best is None or order[user] < order[best[0]]):
                        best = (user, at)
            elif is_glue(user) and (best is None or order[user] < order[best[0]]):
                seen.add(user)
                queue.append(user)
    return best


def _region(weights: Node, width: int, limit: int) -> tuple[set[Node], set[Node]]:
    """Nodes before ``weights`` up to the contractions that feed it, and those contractions."""
    region, scores, queue = {weights}, set(), deque([weights])
    while queue and len(region) < REACH:
        node = queue.popleft()
        if not is_call(node) or opname(node) in BARRIERS or opname(node) in SHAPE_READERS:
            continue
        if opname(node) in CONTRACTIONS:
            if rank(node) == width:
                scores.add(node)
            continue
        for source in node.all_input_nodes:
            if source not in region and (is_tensor(source) or opname(source) in TUPLES):
                region.add(source)
                queue.append(source)
    return region, scores


def _between(region: set[Node], scores: set[Node], order: dict[Node, int]) -> set[Node]:
    """The nodes of ``region`` that depend on one of ``scores``."""
    interior = set(scores)
    for node in sorted(region, key=order.__getitem__):
        if opname(node) in SHAPE_READERS or is_drawn_mask(node):
            continue
        if any(source in interior for source in node.all_input_nodes):
            interior.add(node)
    return interior


def descendants(node: Node, within: frozenset[Node]) -> set[Node]:
    """``node`` and what depends on it, inside ``within``."""
    out, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in within and user not in out:
                out.add(user)
                stack.append(user)
    return out
