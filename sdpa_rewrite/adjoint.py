"""The backward of a site, found in the joint graph.

Every node that reads an interior value of the forward (scores, probabilities, weights) was followed until it left
the N x N world.  A node whose value, on random data, is the gradient of a role is a result that the replacement
provides; everything else that still needs an interior value is an escape, and the candidate a ``Miss``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from sdpa_rewrite import prove
from sdpa_rewrite.algebra.axes import Atom, atoms_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.follow import Followed, follow
from sdpa_rewrite.lift.lifter import Lifter
from sdpa_rewrite.lift.ops import value_of
from sdpa_rewrite.match import Candidate
from sdpa_rewrite.site import Gradient, Miss, Operand, Site


def complete(site: Site, lifter: Lifter, candidate: Candidate, order: dict[Node, int]) -> Site:
    """``site`` with its backward, if the graph has one.  Raises ``Miss`` for an escape, ``Refine`` to split an axis."""
    found = follow(site, lifter, candidate, order)
    cotangent = _cotangent(found) if found.terms else None
    if cotangent is None:
        _Escapes(found, {}, candidate).check()
        return site
    trial = site.with_backward(*cotangent, ())
    named = _named(trial, found, lifter, candidate)
    active = _Escapes(found, named, candidate, cotangent[0].node).check()
    if not active:
        return site
    gradients = tuple(Gradient(named[n].role, Operand(n, found.known[n])) for n in active)
    return _widened(site, [named[n] for n in active]).with_backward(*cotangent, gradients)


def _cotangent(found: Followed) -> tuple[Operand, Term] | None:
    """The gradient of the output: what meets the weights, or what meets the values over their width."""
    site, terms = found.site, found.lifter.terms
    weights = next(a for a in site.result_term.args[0].args if a is not site.value_term)
    known = list(dict.fromkeys(t for t in found.terms.values() if t is not None))
    for term in known:
        if term.op == "reduce" and term.args[0].op == "mul" and weights in term.args[0].args:
            other = next(a for a in term.args[0].args if a is not weights)
            if other.op == "leaf" and set(site.width) <= other.axes:
                return Operand(*other.attr), other
    for term in _subterms(known):
        met = _meets_value(site, term)
        if met is None:
            continue
        renamed = terms.rename(*met)
        if renamed.axes <= {*site.batch, *site.rows, *site.width}:
            return Operand(*renamed.attr), renamed
    return None


def _subterms(tops: Iterable[Term]) -> Iterable[Term]:
    """Every subterm of ``tops`` once."""
    seen: set[Term] = set()
    stack = list(tops)[::-1]
    while stack:
        term = stack.pop()
        if term not in seen:
            seen.add(term)
            yield term
            stack.extend(term.args)


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


def _named(site: Site, found: Followed, lifter: Lifter, candidate: Candidate) -> dict[Node, prove.Claim]:
    """For every node followed: the role whose gradient it is, shown on all draws.

    A capture that the graph also holds expanded (a bias repeated over the batch) may have its gradient read before
    it is summed: then the expanded tensor is the operand.
    """
    roles = {"query": [site.query], "key": [site.key], "value": [site.value]}
    for capture in site.captures:
        if value_of(capture.operand.node).dtype.is_floating_point:
            held = lifter.spellings(capture.term, site.scores_axes)
            roles[capture.name] = [capture.operand, *(o for o in held if o.node in candidate.before)]
    claims: dict[Node, list[prove.Claim]] = {}
    made: dict[tuple[Term, str], prove.Claim] = {}
    for node, term in found.terms.items():
        axes = frozenset(atoms_of(found.known[node]))
        for role, operands in roles.items():
            operand = next((o for o in operands if o.axes == axes), None)
            if term is None or operand is None:
                continue
            claim = made.setdefault((term, role), prove.Claim(term, role, operand))
            claims.setdefault(node, []).append(claim)
    shown = set(prove.gradients(site, list(made.values())))
    return {n: next(c for c in cs if c in shown) for n, cs in claims.items() if any(c in shown for c in cs)}


def _widened(site: Site, active: list[prove.Claim]) -> Site:
    """The site with captures in the spelling that their gradients are read in.  Raises ``Miss`` when there are two."""
    for capture in site.captures:
        operands = {c.operand.axes: c.operand for c in active if c.role == capture.name}
        if len(operands) > 1:
            node = capture.operand.node
            raise Miss(f"the gradient of {node.name} is read both before and after it is summed", "backward", node)
        for operand in operands.values():
            site = site.with_operand(capture, operand)
    return site


@dataclass
class _Escapes:
    """Which interior values are read by what the replacement does not provide."""

    found: Followed
    named: dict[Node, prove.Claim]
    candidate: Candidate
    cotangent: Node | None = None

    def check(self) -> list[Node]:
        """The gradients that are read; raises ``Miss`` when another interior value is."""
        found, named, order = self.found, self.named, self.found.order
        reached = self._reached()
        problems: dict[Node, tuple[Node, Node]] = {}  # interior node -> (it or a node after it, its outside reader)
        for node in sorted(reached, key=order.__getitem__, reverse=True):
            if node in named and not found.square(node):
                continue
            if node in found.outside:
                problems[node] = (node, found.outside[node][0])
                continue
            behind = next((u for u in node.users if u in problems and u not in named), None)
            if behind is not None:
                problems[node] = problems[behind]
        own = sorted(reached - found.terms.keys(), key=order.__getitem__)
        direct = sorted((n for n, (culprit, _) in problems.items() if culprit is n), key=order.__getitem__)
        for node in direct:  # a value of the forward that is read as it is explains more than what becomes of it
            if not self._depends_on_cotangent(node):
                raise self._miss(*problems[node])
        for node in own:
            if node in problems:
                raise self._miss(*problems[node])
        active = [n for n in reached if n in named and (n in problems or not found.square(n))]
        return sorted(active, key=order.__getitem__)

    def _reached(self) -> set[Node]:
        """Interior nodes up to the first gradient on each path; a full bias's gradient may lie on the way to others."""
        found = self.found
        reached = {n for n in found.inner if n not in found.terms}
        stack = list(reached)
        while stack:
            node = stack.pop()
            if node in self.named and not found.square(node):
                continue
            for user in node.users:
                if user in found.inner and user not in reached:
                    reached.add(user)
                    stack.append(user)
        return reached

    def _miss(self, node: Node, reader: Node) -> Miss:
        found = self.found
        what = "output" if reader.op == "output" else str(reader.target)
        if self._depends_on_cotangent(node):
            axes = frozenset(atoms_of(found.known[node]))
            roles = {"query": found.site.query, "key": found.site.key, "value": found.site.value}
            like = [name for name, operand in roles.items() if operand.axes == axes]
            differs = (
                f"differs from the gradient of the {' and the '.join(like)}" if like else "is no gradient of a role"
            )
            return Miss(f"a value of its backward ({node.name}) {differs} and is read by {what}", "backward", reader)
        first = node
        while first in found.terms:  # back to the forward's own value that it comes from
            first = next(n for n in first.all_input_nodes if n in found.inner)
        name = "probabilities" if found.order[first] > found.order[self.candidate.anchor] else "scores"
        through = f", through {node.name}" if node is not first else ""
        return Miss(f"the {name} are also read by {what}{through}", "escape", reader)

    def _depends_on_cotangent(self, node: Node) -> bool:
        if node not in self.found.terms or self.cotangent is None:
            return False
        term = self.found.terms[node]
        return term is None or any(t.op == "leaf" and t.attr[0] is self.cotangent for t in subterms(term))
