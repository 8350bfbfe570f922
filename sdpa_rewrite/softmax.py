"""The softmax in the lifted weights: what is normalised, over what, and by what else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims
from sdpa_rewrite.algebra.term import Term, Terms, subterms, summands
from sdpa_rewrite.candidates import Candidate, descendants, is_glue
from sdpa_rewrite.lift.lifter import Lifter
from sdpa_rewrite.lift.ops import is_piece, opname
from sdpa_rewrite.site import Miss

SEVERAL_KEYS = "one softmax runs over several key tensors (their scores are concatenated)"


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


@dataclass(frozen=True)
class Normalised:
    """``probability`` is softmax(``logits``) over the columns; ``sink`` is an extra logit, ``kind`` the form."""

    probability: Term
    logits: Term
    sink: Term | None
    kind: str


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
    leaf = next(
        (t.attr[0] for t in subterms(lifted.weights) if t.op == "leaf" and t.attr[0] in candidate.interior), None
    )
    if leaf is None:
        return Miss("no division by a sum over the keys", "softmax", candidate.anchor)
    after = descendants(candidate.anchor, candidate.interior)
    joined = any(opname(n) == "cat" for n in candidate.interior - after)
    if (opname(leaf) == "slice" or is_piece(leaf)) and joined and len(candidate.scores) > 1:
        return Miss(f"{SEVERAL_KEYS}: its probabilities are cut into parts that meet several values", "softmax", leaf)
    opaque = next((n for n in _back(leaf, after) if not is_glue(n) and opname(n) not in ("sum", "amax")), leaf)
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
    """The sum of ``parts``."""
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
                f"the probabilities are normalised over {names_of(over)}, but contracted over {names_of(columns)}",
                "softmax",
                node_of(lifted, term) or lifted.candidate.anchor,
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


def names_of(atoms: frozenset[Atom]) -> str:
    """Axes in words."""
    return (
        "axes of sizes " + ", ".join(str(a.size) for a in sorted(atoms, key=lambda a: a.name)) if atoms else "no axis"
    )


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
    node = node_of(lifted, term) or lifted.candidate.anchor
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


def node_of(lifted: Lifted, term: Term) -> Node | None:
    """The node of the graph that holds ``term``."""
    asked = lifted.lifter.asked.get(term)
    return asked[0] if asked else None
