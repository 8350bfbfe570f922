"""From a softmax in the graph to the roles of an attention: query, key, value, score program, weight program.

Roles are found by structure.  That they mean what they seem to mean is shown afterwards, by ``prove``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Window, atoms_of, same_size, shape_of
from sdpa_rewrite.algebra.term import Term, Terms, subterms, summands
from sdpa_rewrite.lift.lifter import Axes, CannotWindow, Lifter
from sdpa_rewrite.lift.ops import (
    CASTS,
    CONTRACTIONS,
    LAYOUT,
    PIECEWISE,
    SHAPE_READERS,
    SOFTMAXES,
    is_call,
    is_pointwise,
    is_tensor,
    opname,
    rank,
    value_of,
)
from sdpa_rewrite.site import Capture, Miss, Operand, Site

SEVERAL_KEYS = "one softmax runs over several key tensors (their scores are concatenated)"
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
        return self.product.args[self.weights_at]  # type: ignore[return-value]

    @property
    def values(self) -> Node:
        first = 1 if opname(self.product) in ("baddbmm", "addmm") else 0
        return self.product.args[2 * first + 1 - self.weights_at]  # type: ignore[return-value]


def candidates(graph: Graph) -> Iterator[Candidate]:
    """Every exponential or softmax that has a contraction before it and one after it.  Linear in the graph."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    taken: set[tuple[Node, int]] = set()
    for node in graph.nodes:
        if not is_call(node) or not _normalised(node):
            continue
        found = _product_after(node, order)
        if found is None or found in taken:
            continue
        product, at = found
        region, scores = _region(product.args[at], rank(product), order[product])  # type: ignore[arg-type]
        if not scores or node not in region:
            continue
        interior = _between(region, scores, order)
        if node not in interior:
            continue
        taken.add(found)
        first = tuple(sorted(scores, key=order.__getitem__))
        yield Candidate(node, product, at, frozenset(interior), first, frozenset(region))


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
    exponent = node.args[0]
    if not isinstance(exponent, Node) or opname(exponent) not in ("sub", "add"):
        return False
    return any(opname(_behind_layout(a)) in ("log", "logsumexp") for a in exponent.all_input_nodes)


def _behind_layout(node: Node) -> Node:
    while is_call(node) and (opname(node) in LAYOUT or opname(node) in CASTS):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _glue(node: Node) -> bool:
    name = opname(node)
    return name in LAYOUT or name in PIECEWISE or is_pointwise(node)


def _product_after(anchor: Node, order: dict[Node, int]) -> tuple[Node, int] | None:
    """The first contraction that the exponential reaches through pointwise and layout operators, and at which operand."""
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
            elif _glue(user) and (best is None or order[user] < order[best[0]]):
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
            if source not in region and (is_tensor(source) or opname(source) == "max"):
                region.add(source)
                queue.append(source)
    return region, scores


def _between(region: set[Node], scores: set[Node], order: dict[Node, int]) -> set[Node]:
    """The nodes of ``region`` that depend on one of ``scores``."""
    interior = set(scores)
    for node in sorted(region, key=order.__getitem__):
        if opname(node) not in SHAPE_READERS and any(source in interior for source in node.all_input_nodes):
            interior.add(node)
    return interior


@dataclass(frozen=True)
class Lifted:
    """The forward of a candidate as terms."""

    lifter: Lifter
    candidate: Candidate
    dims: Dims
    columns: Dim
    weights: Term
    value: Term
    result: Term


def lift(candidate: Candidate, axes: Axes) -> Lifted:
    """Terms of the output of ``candidate``.  Raises ``Refine`` (split and ask again) or ``Miss``."""
    lifter = Lifter(axes, set(candidate.interior))
    product = candidate.product
    names = ("B", "i", "e") if len(shape_of(value_of(product))) == 3 else ("i", "e")
    dims = tuple(axes.dim((product, n), s, n) for n, s in zip(names, shape_of(value_of(product)), strict=True))
    left_is_weights = candidate.weights_at == (1 if opname(product) in ("baddbmm", "addmm") else 0)
    shape = shape_of(value_of(candidate.weights))
    columns = axes.dim((product, "j"), shape[-1] if left_is_weights else shape[-2], "j")
    lifter.bound += [columns, *((a,) for a in atoms_of(dims[:-2] + (dims[-2 if left_is_weights else -1],)))]
    if left_is_weights:
        at, other = (*dims[:-1], columns), (*dims[:-2], columns, dims[-1])
    else:
        at, other = (*dims[:-2], columns, dims[-1]), (*dims[:-1], columns)
    try:
        if opname(product) in ("baddbmm", "addmm"):
            raise Miss("the values are contracted by an operator that also adds", "value", product)
        weights = lifter.request(candidate.weights, at)
        value = lifter.operand(candidate.values, other)
        result = lifter.terms.reduce("sum", lifter.terms.call("mul", weights, value), columns)
    except (Irregular, CannotWindow) as error:
        raise Miss(f"the neighbourhood cannot be written in named axes: {error}", "layout", candidate.anchor) from error
    lifter.asked.setdefault(result, (product, dims))
    return Lifted(lifter, candidate, dims, columns, weights, value, result)


@dataclass(frozen=True)
class Normalised:
    """``probability`` is softmax(``logits``) over the columns; ``sink`` is an extra logit, ``kind`` the form."""

    probability: Term
    logits: Term
    sink: Term | None
    kind: str


def site_of(lifted: Lifted) -> Site:
    terms, columns = lifted.lifter.terms, lifted.columns
    softmax = find_softmax(lifted)
    scores = find_scores(lifted, softmax)
    query, key = sides(scores, columns)
    check_free(lifted, scores, softmax)
    batch = tuple(a for a in _ordered(lifted, scores) if a not in columns and a in scores.axes)
    rows = _rows(lifted, key)
    batch = tuple(a for a in batch if a not in rows)
    depth = scores.attr[1]
    width = tuple(a for a in atoms_of(lifted.dims) if a in lifted.value.axes and a not in scores.axes)
    stray = [a for a in query.axes if a not in (*batch, *rows, *depth)] + [
        a for a in key.axes if a not in (*batch, *columns, *depth)
    ]
    if stray:
        raise Miss(f"query and key have axes {stray} that the scores lack", "score", _node(lifted, scores))
    full = frozenset((*batch, *rows, *columns))
    programs = {
        "score": terms.substitute(softmax.logits, {scores: terms.hole("score", full)}),
        "weight": terms.substitute(lifted.weights, {softmax.probability: terms.hole("probability", full)}),
    }
    sink = softmax.sink
    captures, programs, sink = capture(lifted, programs, sink)
    check_captures(lifted, scores, captures)
    check_pointwise(lifted, programs, set(columns))
    check_types(lifted, query, key, full)
    node, dims = query.attr
    key_node, key_dims = key.attr
    value_node, value_dims = lifted.value.attr
    return Site(
        terms=terms,
        batch=batch,
        rows=rows,
        columns=columns,
        depth=depth,
        width=width,
        query=Operand(node, dims),
        key=Operand(key_node, key_dims),
        value=Operand(value_node, value_dims),
        query_term=query,
        key_term=key,
        value_term=lifted.value,
        score=programs["score"],
        weight=programs["weight"],
        softmax="safe" if softmax.kind == "safe" else "softmax",
        sink=sink,
        captures=captures,
        result=Operand(lifted.candidate.product, lifted.dims),
        result_term=lifted.result,
        scores_node=_node(lifted, scores) or lifted.candidate.anchor,
        softmax_node=lifted.candidate.anchor,
        probability_term=softmax.probability,
        scores_term=scores,
    )


def check_captures(lifted: Lifted, scores: Term, captures: tuple[Capture, ...]) -> None:
    """No captured tensor is made of the scores (their transpose, say).  Raises ``Miss``."""
    node = _node(lifted, scores)
    below = _descendants(node, lifted.candidate.interior) if node is not None else set()
    for capture in captures:
        if capture.operand.node in below:
            raise Miss("the scores are also read along other axes", "score", capture.operand.node)


def check_pointwise(lifted: Lifted, programs: dict[str, Term], columns: set[Atom]) -> None:
    """Scores are mapped one by one; weights too, or with sums along their own row.  Raises ``Miss``."""
    for role, program in programs.items():
        name = "scores" if role == "score" else "probabilities"
        for term in subterms(program):
            inside = term.op in ("reduce", "cat", "part", "along") and any(
                t.op == "hole" and t.attr in ("score", "probability") for t in subterms(term)
            )
            if inside and not (role == "weight" and term.op == "reduce" and set(term.attr[1]) <= columns):
                over = frozenset(term.attr[1]) if term.op == "reduce" else frozenset()
                what = f"mixed over {_names(over)}" if over else f"rearranged ({term.op})"
                raise Miss(f"the {name} are {what}", role, lifted.candidate.anchor)


def check_types(lifted: Lifted, query: Term, key: Term, full: frozenset[Atom]) -> None:
    """Floating types, and something along every axis.  Raises ``Miss``."""
    for role, term in (("query", query), ("key", key), ("value", lifted.value)):
        node = term.attr[0]
        if not value_of(node).dtype.is_floating_point:
            raise Miss(f"the {role} is of type {value_of(node).dtype}", role, node)
    for atom in full | query.axes | lifted.value.axes:
        if same_size(atom.size, 0):
            raise Miss("an axis has no positions", "layout", lifted.candidate.product)


def _ordered(lifted: Lifted, scores: Term) -> list[Atom]:
    first = [a for a in atoms_of(lifted.dims) if a in scores.axes]
    return first + sorted((a for a in scores.axes if a not in first), key=lambda a: a.name)


def _rows(lifted: Lifted, key: Term) -> Dim:
    """The axes of the product's row dimension, which key and value lack.  Raises ``Miss`` where they do not."""
    product = lifted.candidate.product
    rows = lifted.dims[-2] if lifted.candidate.values is product.args[1] else lifted.dims[-1]
    for role, axes in (("key", key.axes), ("value", lifted.value.axes)):
        if axes & set(rows):
            raise Miss(f"each query has {role}s of its own", role, product)
    return rows


def _node(lifted: Lifted, term: Term) -> Node | None:
    asked = lifted.lifter.asked.get(term)
    return asked[0] if asked else None


def find_softmax(lifted: Lifted) -> Normalised:
    """The outermost normalisation over the columns in the weights.  Raises ``Miss``."""
    nearest: Miss | None = None
    for term in subterms(lifted.weights):
        try:
            found = normalisation(lifted, term)
        except Miss as miss:
            nearest = nearest or miss
            continue
        if found is not None:
            return _safe(lifted, found)
    raise nearest or _hidden(lifted)


def _hidden(lifted: Lifted) -> Miss:
    """Why no softmax is seen in the weights: what stands between it and the product."""
    candidate = lifted.candidate
    leaf = next((t.attr[0] for t in subterms(lifted.weights) if t.op == "leaf" and t.attr[0] in candidate.interior), None)
    if leaf is None:
        return Miss("no division by a sum over the keys", "softmax", candidate.anchor)
    after = _descendants(candidate.anchor, candidate.interior)
    joined = any(opname(n) == "cat" for n in candidate.interior - after)
    if opname(leaf) == "slice" and joined and len(candidate.scores) > 1:
        return Miss(
            f"{SEVERAL_KEYS}: its probabilities are cut into parts that meet several values", "softmax", leaf
        )
    opaque = next((n for n in _back(leaf, after) if not _glue(n) and opname(n) not in ("sum", "amax")), leaf)
    return Miss(f"the probabilities pass through {opaque.target}", "weight", opaque)


def _back(node: Node, within: set[Node]) -> Iterator[Node]:
    """``node`` and what it depends on, inside ``within``."""
    seen, queue = {node}, deque([node])
    while queue:
        top = queue.popleft()
        yield top
        for source in top.all_input_nodes:
            if source in within and source not in seen:
                seen.add(source)
                queue.append(source)


def _safe(lifted: Lifted, found: Normalised) -> Normalised:
    """where(row is empty, 0, softmax): torch's safe softmax."""
    zero = lifted.lifter.terms.number(0.0)
    for term in subterms(lifted.weights):
        if term.op != "where":
            continue
        condition, a, b = term.args
        if {a, b} == {zero, found.probability} and not condition.axes & set(lifted.columns):
            return Normalised(term, found.logits, found.sink, "safe")
    return found


def normalisation(lifted: Lifted, term: Term) -> Normalised | None:
    """e / sum(e), e * (1 / sum(e)), or exp(x - log(sum(exp(x))))."""
    terms = lifted.lifter.terms
    if term.op == "div":
        numerator, denominator = term.args
        return _quotient(lifted, term, numerator, denominator)
    if term.op == "mul":
        for x, y in (term.args, term.args[::-1]):
            if y.op == "div" and y.args[0].op == "number" and y.args[0].attr == 1:
                found = _quotient(lifted, term, x, y.args[1])
                if found:
                    return found
    if term.op == "exp":
        parts = summands(terms, term.args[0])
        for part in parts:
            if part.op == "mul" and any(a.op == "log" for a in part.args):
                log = next(a for a in part.args if a.op == "log")
                factor = next((a for a in part.args if a is not log), None)
                if factor is None or factor.op != "number" or factor.attr != -1:
                    continue
                rest = total(terms, [p for p in parts if p is not part])
                return _quotient(lifted, term, terms.call("exp", rest), log.args[0])
    return None


def total(terms: Terms, parts: list[Term]) -> Term:
    out = parts[0] if parts else terms.number(0.0)
    for part in parts[1:]:
        out = terms.call("add", out, part)
    return out


def _quotient(lifted: Lifted, term: Term, numerator: Term, denominator: Term) -> Normalised | None:
    terms, columns = lifted.lifter.terms, frozenset(lifted.columns)
    if numerator.op != "exp":
        return None
    parts = summands(terms, denominator)
    sums = [p for p in parts if p.op == "reduce" and p.attr[0] == "sum"]
    for part in sums:
        over = frozenset(part.attr[1])
        if over != columns and part.args[0] is numerator:
            raise Miss(
                f"the probabilities are normalised over {_names(over)}, but contracted over {_names(columns)}",
                "softmax",
                _node(lifted, term) or lifted.candidate.anchor,
            )
    main = [p for p in sums if frozenset(p.attr[1]) == columns and p.args[0] is numerator]
    if not columns and numerator in parts:  # one key only: its sum over the keys is itself
        main = [numerator]
    if len(main) != 1:
        return None
    shift, logits = split_shift(lifted, numerator.args[0])
    extras = [p for p in parts if p is not main[0]]
    sink = _sink(lifted, extras, shift, term) if extras else None
    return Normalised(term, logits, sink, "softmax")


def _names(atoms: frozenset[Atom]) -> str:
    return "axes of sizes " + ", ".join(str(a.size) for a in sorted(atoms, key=lambda a: a.name)) if atoms else "no axis"


def split_shift(lifted: Lifted, exponent: Term) -> tuple[Term | None, Term]:
    """Separate what is constant along each row and comes from the row itself (its maximum) from the logits."""
    terms = lifted.lifter.terms
    parts = summands(terms, exponent)
    columns = set(lifted.columns)
    shift = [p for p in parts if not p.axes & columns and p.op != "number" and _from_row(p, columns)]
    if not shift:
        return None, exponent
    return total(terms, shift), total(terms, [p for p in parts if p not in shift])


def _from_row(term: Term, columns: set[Atom]) -> bool:
    """Whether a row constant is made of reductions over the columns (a maximum), not of a tensor of the user's.

    What the user adds to a whole row may be infinite, and then it matters.
    """
    if term.op == "reduce":
        return bool(set(term.attr[1]) & columns)
    if term.op == "maximum":  # of a row and a sink
        return any(_from_row(a, columns) for a in term.args)
    if term.op in ("add", "mul"):
        numbers = [a for a in term.args if a.op == "number"]
        return len(numbers) < 2 and all(_from_row(a, columns) for a in term.args if a.op != "number")
    return False


def _sink(lifted: Lifted, extras: list[Term], shift: Term | None, term: Term) -> Term:
    """The logit whose exponential, shifted like the others, is the extra part of the denominator."""
    terms = lifted.lifter.terms
    extra = total(terms, extras)
    node = _node(lifted, term) or lifted.candidate.anchor
    if extra.axes & set(lifted.columns):
        raise Miss("the denominator has a part that varies along the keys", "softmax", node)
    if any(p.op == "reduce" and p.attr[0] == "sum" for p in extras):
        raise Miss(f"{SEVERAL_KEYS}: the denominator also sums over other scores", "softmax", node)
    if extra.op != "exp" and shift is None:
        return terms.call("log", extra)
    if extra.op == "exp":
        parts = summands(terms, extra.args[0])
        if shift is None:
            return extra.args[0]
        for part in summands(terms, shift):
            if part not in parts:
                raise Miss("the denominator has a part that is shifted unlike the scores", "softmax", node)
            parts.remove(part)
        return total(terms, parts)
    raise Miss("the denominator has an added part that depends on the scores' maximum", "softmax", node)


def find_scores(lifted: Lifted, softmax: Normalised) -> Term:
    """The contraction of query and key in the logits.  Raises ``Miss`` naming what hides it."""
    columns = set(lifted.columns)
    found = [t for t in subterms(softmax.logits) if _is_scores(t, columns)]
    if not found:
        hidden = [t for t in subterms(softmax.logits) if t.op == "leaf" and t.attr[0] in lifted.candidate.interior]
        node = hidden[0].attr[0] if hidden else lifted.candidate.anchor
        text = f"the scores pass through {node.target}" if hidden else "no contraction of a query with a key"
        raise Miss(text, "score", node)
    return max(found, key=lambda t: (len(t.axes), -t.order))


def _is_scores(term: Term, columns: set[Atom]) -> bool:
    if term.op != "reduce" or term.attr[0] != "sum" or term.args[0].op != "mul":
        return False
    a, b = term.args[0].args
    if a.op != "leaf" or b.op != "leaf":
        return False
    if not columns:
        return set(term.attr[1]) <= a.axes & b.axes
    return bool(a.axes & columns) != bool(b.axes & columns) and set(term.attr[1]) <= a.axes & b.axes


def sides(scores: Term, columns: Dim) -> tuple[Term, Term]:
    """Query and key: the key varies along the columns.  With one key, the side with fewer axes is the key."""
    a, b = scores.args[0].args
    if not columns:
        return (a, b) if len(a.axes) >= len(b.axes) else (b, a)
    return (b, a) if a.axes & set(columns) else (a, b)


def check_free(lifted: Lifted, scores: Term, softmax: Normalised) -> None:
    """Nothing beside the softmax may depend on the scores.  Raises ``Miss``."""
    terms = lifted.lifter.terms
    outer = terms.substitute(lifted.weights, {softmax.probability: terms.number(1.0)})
    inner = terms.substitute(softmax.logits, {scores: terms.number(1.0)})
    product = _node(lifted, scores)
    below = _descendants(product, lifted.candidate.interior) if product is not None else set()
    for role, term in (("weight", outer), ("score", inner)):
        for t in subterms(term):
            if t is scores or (t.op == "leaf" and t.attr[0] in below):
                node = t.attr[0] if t.op == "leaf" else product
                what = f" through {node.target}" if t.op == "leaf" and node is not None else ""
                raise Miss(f"the {role} program reads the scores a second time{what}", role, node)


def _descendants(node: Node, within: frozenset[Node]) -> set[Node]:
    out, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in within and user not in out:
                out.add(user)
                stack.append(user)
    return out


def capture(
    lifted: Lifted, programs: dict[str, Term], sink: Term | None
) -> tuple[tuple[Capture, ...], dict[str, Term], Term | None]:
    """Replace the largest subterms that do not depend on a hole, and that the graph holds, by holes of their own."""
    terms, asked = lifted.lifter.terms, lifted.lifter.asked
    found: dict[Term, Capture] = {}

    def walk(term: Term) -> None:
        free = not any(t.op == "hole" for t in subterms(term))
        if free and (term.op == "number" or not _reads_tensor(term)):
            return
        if free and term in asked and not any(isinstance(a, Window) for a in atoms_of(asked[term][1])):
            node, dims = asked[term]
            found.setdefault(term, Capture(f"capture{len(found)}", term, Operand(node, dims)))
            return
        if free and not term.args:
            raise Miss("a captured tensor has no node of its own", "score", lifted.candidate.anchor)
        for arg in term.args:
            walk(arg)

    for program in (*programs.values(), *((sink,) if sink is not None else ())):
        walk(program)
    holes = {t: terms.hole(c.name, c.operand.axes) for t, c in found.items()}
    replaced = {name: terms.substitute(p, holes) for name, p in programs.items()}
    return tuple(found.values()), replaced, terms.substitute(sink, holes) if sink is not None else None


def _reads_tensor(term: Term) -> bool:
    return any(t.op == "leaf" for t in subterms(term))
