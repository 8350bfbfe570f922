"""From a softmax in the graph to the roles of an attention: query, key, value, score program, weight program.

Roles are found by structure.  That they mean what they seem to mean is shown afterwards, by ``prove``.
"""

from __future__ import annotations

from typing import TypeGuard

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Irregular, Window, atoms_of, same_size, shape_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.candidates import Candidate as Candidate
from sdpa_rewrite.candidates import candidates as candidates
from sdpa_rewrite.candidates import descendants
from sdpa_rewrite.lift.lifter import Axes, CannotWindow, Lifter
from sdpa_rewrite.lift.ops import CONTRACTIONS, is_call, opname, value_of
from sdpa_rewrite.site import Capture, Miss, Operand, Site
from sdpa_rewrite.softmax import Lifted, Normalised, find_softmax, names_of, node_of

Plane = tuple[frozenset[Atom], frozenset[Atom]]
"""The axes of the rows and of the columns of the scores."""
CHEAP = 24
"""Subterms of what a kernel computes again for each score instead of reading it."""
SIMPLE = frozenset({"leaf", "number", "index", "add", "mul", "where", "le", "lt", "eq", "ne", "and", "or", "not"}) | {
    *("float", "int", "bool", "maximum", "minimum")
}


def lift(candidate: Candidate, axes: Axes) -> Lifted:
    """Terms of the output of ``candidate``.  Raises ``Refine`` (split and ask again) or ``Miss``."""
    lifter = Lifter(axes, set(candidate.interior))
    product = candidate.product
    names = ("B", "i", "e") if len(shape_of(value_of(product))) == 3 else ("i", "e")
    dims = tuple(axes.dim((product, n), s, n) for n, s in zip(names, shape_of(value_of(product)), strict=True))
    left_is_weights = candidate.weights_at == (1 if opname(product) in ("baddbmm", "addmm") else 0)
    shape = shape_of(value_of(candidate.weights))
    if any(same_size(n, 0) for n in (*shape, *shape_of(value_of(product)))):
        raise Miss("an axis has no positions", "layout", product)
    columns = axes.dim((product, "j"), shape[-1] if left_is_weights else shape[-2], "j")
    lifter.bound += [columns, *((a,) for a in atoms_of((*dims[:-2], dims[-2 if left_is_weights else -1])))]
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


def site_of(lifted: Lifted, apart: list[Term] | None = None) -> Site:
    """The roles of a lifted candidate; ``apart`` gets the captures that are taken apart.  Raises ``Miss``.

    Without such a list, none is.
    """
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
        raise Miss(f"query and key have axes {stray} that the scores lack", "score", node_of(lifted, scores))
    full = frozenset((*batch, *rows, *columns))
    programs = {
        "score": terms.substitute(softmax.logits, {scores: terms.hole("score", full)}),
        "weight": terms.substitute(lifted.weights, {softmax.probability: terms.hole("probability", full)}),
    }
    sink = softmax.sink
    captures, programs, sink = capture(lifted, programs, sink, (frozenset(rows), frozenset(columns)), apart)
    check_captures(lifted, scores, captures)
    check_pointwise(lifted, programs, set(columns))
    check_types(lifted, scores, query, key, full)
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
        scores_node=node_of(lifted, scores) or lifted.candidate.anchor,
        softmax_node=lifted.candidate.anchor,
        probability_term=softmax.probability,
        scores_term=scores,
    )


def check_captures(lifted: Lifted, scores: Term, captures: tuple[Capture, ...]) -> None:
    """No captured tensor is made of the scores (their transpose, say).  Raises ``Miss``."""
    node = node_of(lifted, scores)
    below = descendants(node, lifted.candidate.interior) if node is not None else set()
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
                what = f"mixed over {names_of(over)}" if over else f"rearranged ({term.op})"
                raise Miss(f"the {name} are {what}", role, lifted.candidate.anchor)


def check_types(lifted: Lifted, scores: Term, query: Term, key: Term, full: frozenset[Atom]) -> None:
    """Floating types, that a product may have together, and something along every axis.  Raises ``Miss``."""
    for role, term in (("query", query), ("key", key), ("value", lifted.value)):
        node = term.attr[0]
        if not value_of(node).dtype.is_floating_point:
            raise Miss(f"the {role} is of type {value_of(node).dtype}", role, node)
    for role, product in (("score", node_of(lifted, scores)), ("value", lifted.candidate.product)):
        types = {str(value_of(x).dtype) for x in product.all_input_nodes} if _multiplies(product) else set()
        if len(types) > 1:  # torch 2.11 traces it
            raise Miss(f"eager has no product of {' and '.join(sorted(types))}", role, product)
    for atom in full | query.axes | lifted.value.axes:
        if same_size(atom.size, 0):
            raise Miss("an axis has no positions", "layout", lifted.candidate.product)


def _multiplies(node: Node | None) -> TypeGuard[Node]:
    return node is not None and is_call(node) and opname(node) in CONTRACTIONS


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
    product = node_of(lifted, scores)
    below = descendants(product, lifted.candidate.interior) if product is not None else set()
    for role, term in (("weight", outer), ("score", inner)):
        for t in subterms(term):
            if t is scores or (t.op == "leaf" and t.attr[0] in below):
                node = t.attr[0] if t.op == "leaf" else product
                what = f" through {node.target}" if t.op == "leaf" and node is not None else ""
                raise Miss(f"the {role} program reads the scores a second time{what}", role, node)


def capture(
    lifted: Lifted, programs: dict[str, Term], sink: Term | None, plane: Plane, apart: list[Term] | None
) -> tuple[tuple[Capture, ...], dict[str, Term], Term | None]:
    """Replace the largest subterms that do not depend on a hole, and that the graph holds, by holes of their own.

    What is as large as the scores and made of smaller tensors is taken ``apart``: a kernel makes a position of it for
    less than reading it costs.
    """
    terms, asked = lifted.lifter.terms, lifted.lifter.asked
    found: dict[Term, Capture] = {}

    def walk(term: Term) -> None:
        free = not any(t.op == "hole" for t in subterms(term))
        if free and (term.op == "number" or not _reads_tensor(term)):
            return
        smaller = _smaller(term, plane) if free and apart is not None else []
        if apart is not None and smaller and all(t in asked for t in smaller):
            apart.append(term)
        elif free and term in asked and not _has_window(asked[term][1]):
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


def _has_window(dims: Dims) -> bool:
    return any(isinstance(a, Window) for a in atoms_of(dims))


def _smaller(term: Term, plane: Plane) -> list[Term]:
    """The tensors that ``term``, which varies along all rows and columns, is made of with little to compute.

    Empty where one of them does so itself.
    """

    def square(t: Term) -> bool:
        return all(side and side <= t.axes for side in plane)

    inner = list(subterms(term))
    leaves = [t for t in inner if t.op == "leaf"]
    cheap = len(inner) <= CHEAP and all(t.op in SIMPLE for t in inner)
    return leaves if square(term) and cheap and not any(map(square, leaves)) else []


def _reads_tensor(term: Term) -> bool:
    return any(t.op == "leaf" for t in subterms(term))
