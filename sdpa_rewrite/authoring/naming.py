"""Names for sites: which forms of the library an attention is made of.

The engine proves sites; a *named form* only says what a site is called.  It is a pattern like any other, but is not
matched a second time: what the engine finds in its own trace are its facts, and a site that has these facts has the
name.  Forms combine: a causal attention with dropout is both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from torch.fx import Node

from sdpa_rewrite import analyse, match
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.authoring import registry
from sdpa_rewrite.authoring.lifted import LiftedPattern, head, lifted_variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.describe import dropout
from sdpa_rewrite.emit.affine import Affine, Fill, NotAffine, affine
from sdpa_rewrite.emit.relations import predicate
from sdpa_rewrite.lift.ops import is_call, opname
from sdpa_rewrite.site import Miss, Site

PLAIN = frozenset({"add", "mul", "div", "hole", "number", "where", "index", "le", "lt", "not", "and", "or", "eq", "ne"})
CASTS = frozenset({"float", "int", "bool", "leaf"})


def name_of(site: Site) -> str:
    """The names of the forms that ``site`` is made of, the most telling one first; empty where none is known."""
    forms = [p for p in registry.active() if p.names_sites]
    left = set(facts(site))
    names = []
    for pattern in sorted(forms, key=lambda p: -len(facts_of(p))):
        wanted = facts_of(pattern)
        if wanted and wanted <= left:
            left -= wanted
            names.append(pattern.name.replace("_", " "))
    return " + ".join(names)


@functools.lru_cache(maxsize=256)
def facts_of(pattern: Pattern) -> frozenset[str]:
    """What the engine finds in the pattern's own trace."""
    site = own_site(lifted_variant(pattern, 0))
    return facts(site) if isinstance(site, Site) else frozenset()


def own_site(lifted: LiftedPattern) -> Site | Miss:
    """The one attention in a pattern's own trace, or why the engine does not find it."""
    order = {n: k for k, n in enumerate(lifted.graph.nodes)}
    for candidate in match.candidates(lifted.graph):
        try:
            with clean_room():
                return analyse.certified(candidate, order)
        except Miss as miss:
            return miss
    return Miss("no softmax between two contractions")


def facts(site: Site) -> frozenset[str]:
    """What is particular to a site, in words; spelling, sizes, types and numbers are not."""
    return frozenset(_facts(site))


def _facts(site: Site) -> Iterator[str]:
    try:
        form = affine(site)
        yield from _masks(site, form)
        if form.scale.axes:
            yield "scale: one per head"
    except NotAffine:
        yield from _operators(site.score)
    if site.softmax == "safe":
        yield "safe softmax"
    if site.sink is not None:
        yield "sink: a tensor" if any(t.op == "hole" for t in subterms(site.sink)) else "sink: a number"
    if site.weight.op != "hole":
        yield "dropout" if dropout(site) else "weights changed"
    if _normalised(site.query.node) and _normalised(site.key.node):
        yield "query and key normalised"
    if is_call(head(site.key.node)) and opname(head(site.key.node)) == "cat":
        yield "keys concatenated"


def _masks(site: Site, form: Affine) -> Iterator[str]:
    related = {p.relation for p in form.predicates}
    for relation in form.predicates:
        yield f"mask: {_without_numbers(relation.describe())}"
    holes = {site.terms.hole(c.name, c.operand.axes): c.term for c in site.captures}
    parts: list[Term | Fill] = [*form.bias, *form.fills]
    for term in parts:
        value: Term = term.condition if isinstance(term, Fill) else term
        own = predicate(value, site)
        if own is not None and ({own.relation, own.negated().relation} & related):
            continue
        if not isinstance(term, Fill) and not any(t.op == "hole" for t in subterms(value)):
            continue  # a relation, spelled as a sum
        whole = site.terms.substitute(value, holes)
        if isinstance(term, Fill):
            yield f"mask: {_kind(site, whole)}"
        else:
            yield from (f"bias: {_kind(site, part)}" for part in _parts(whole))


def _parts(term: Term) -> Iterator[Term]:
    """The addends of a bias, its numbers left out."""
    if term.op == "add" and not any(t.op == "index" for t in subterms(term)):
        for arg in term.args:
            yield from _parts(arg)
    elif _reads(term):
        yield term


def _kind(site: Site, term: Term) -> str:
    """What a mask or bias is made of."""
    inside, axes = list(subterms(term)), {a for t in subterms(term) for a in t.axes}
    over = []
    for name, own in (("rows", set(site.rows)), ("columns", set(site.columns))):
        if own & axes:
            over.append(name if own <= axes else f"a part of the {name}")
    parts = [f"over {' and '.join(over) or 'heads'}"]
    if any(t.op in ("eq", "ne") and all(_reads(a) for a in t.args) for t in inside):
        parts.append("where two tensors agree")
    elif any(t.op == "index" for t in inside):
        parts.append("by position")
    made = sorted({n for t in inside if t.op == "leaf" for n in _makers(t.attr[0])})
    return " ".join([*parts, *made])


def _reads(term: Term) -> bool:
    return any(t.op == "leaf" for t in subterms(term))


def _makers(node: Node) -> Iterator[str]:
    """How a bias was made, where that is telling."""
    stack, seen = [head(node)], 0
    while stack and seen < 6:
        top = stack.pop()
        seen += 1
        if not is_call(top):
            continue
        name = opname(top)
        if name in ("gather", "constant_pad_nd"):
            yield {"gather": "gathered", "constant_pad_nd": "shifted"}[name]
        elif name in ("slice", "view", "cat"):
            stack.extend(head(n) for n in top.all_input_nodes)


def _operators(term: Term) -> Iterator[str]:
    names = {t.op if t.op != "apply" else str(t.attr[0]) for t in subterms(term)} - PLAIN - CASTS
    yield from (f"score: {n}" for n in names)
    if any(t.op == "index" for t in subterms(term)):
        yield "mask: inside the score program"


def _normalised(node: Node) -> bool:
    """Whether a tensor was divided by its own length."""
    top = head(node)
    if not is_call(top) or opname(top) not in ("div", "mul"):
        return False
    stack, seen = list(top.all_input_nodes), 0
    while stack and seen < 12:
        source = stack.pop()
        seen += 1
        if is_call(source) and opname(source) in ("linalg_vector_norm", "norm"):
            return True
        if is_call(source) and opname(source) in ("sqrt", "rsqrt", "pow") and _sums(source):
            return True
        if is_call(source) and opname(source) not in ("mm", "bmm"):
            stack.extend(source.all_input_nodes)
    return False


def _sums(node: Node) -> bool:
    return any(is_call(n) and opname(n) == "sum" for n in node.all_input_nodes)


def _without_numbers(text: str) -> str:
    return re.sub(r"\bs?\d+(\.\d+)?\b", "n", text)
