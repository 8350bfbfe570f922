"""Which terms are linear in a leaf by construction.

A gradient is linear in the cotangent.  Random data cannot show that of a program that clips or rescales what passes
through it only beyond some size; its structure can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sdpa_rewrite.algebra.term import Term

Degree = Literal["zero", "constant", "linear", "other"]
LINEAR_FIRST = frozenset({"tanh_backward", "sigmoid_backward", "neg", "clone"})  # linear in the first argument
ANALYTIC = frozenset(  # functions that no far-away condition hides in
    {"sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "pow", "reciprocal", "square"}
    | {"sin", "cos", "erf", "sinh", "cosh", "tanh_backward", "sigmoid_backward", "fma"}
)


@dataclass(frozen=True)
class _Question:
    """In which tensors a term is to be linear; terms of the forward; what is not to hide a condition."""

    nodes: frozenset[Any]
    known: Set[Term]
    guarded: Callable[[Term], bool]


def is_linear(term: Term, leaves: Iterable[Term], known: Set[Term], guarded: Callable[[Term], bool]) -> bool:
    """Whether ``term`` is linear in the tensors of ``leaves`` taken together.

    Functions with a condition inside are taken from ``known`` terms (the forward's) only, where they are ``guarded``
    (of the scores, say).
    """
    question = _Question(frozenset(leaf.attr[0] for leaf in leaves), known, guarded)
    return _degree(term, question) in ("linear", "zero")


def _degree(term: Term, question: _Question) -> Degree:
    memo: dict[Term, Degree] = {}
    stack = [term]
    while stack:  # an explicit stack: graphs are deeper than Python's
        top = stack[-1]
        missing = [a for a in top.args if a not in memo and (a not in question.known or a.op == "number")]
        if top in memo or not missing:
            stack.pop()
            if top not in memo:
                memo[top] = _combine(top, [memo.get(a, "constant") for a in top.args], question)
        else:
            stack.extend(missing)
    return memo[term]


def _combine(term: Term, args: list[Degree], question: _Question) -> Degree:
    if term.op == "leaf":
        return "linear" if term.attr[0] in question.nodes else "constant"
    if term.op == "number" and not isinstance(term.attr, bool) and term.attr == 0:
        return "zero"
    if "other" in args:
        return "other"
    if term.op == "mul" and "zero" in args:
        return "zero"
    if "linear" not in args:
        return _constant(term, args, question)
    return _passes(term, args)


def _constant(term: Term, args: list[Degree], question: _Question) -> Degree:
    if args and all(a == "zero" for a in args) and term.op in ("add", "reduce", "cat", "part"):
        return "zero"
    if term.op == "apply" and _name(term) not in ANALYTIC and term not in question.known and question.guarded(term):
        return "other"
    return "constant"


def _passes(term: Term, args: list[Degree]) -> Degree:
    """What ``term`` makes of arguments of which one at least is linear."""
    values = args
    if term.op == "mul":
        return "linear" if args.count("linear") == 1 else "other"
    if term.op == "div":
        return "linear" if args[0] == "linear" and args[1] == "constant" else "other"
    if term.op == "apply":
        return "linear" if _name(term) in LINEAR_FIRST and "linear" not in args[1:] else "other"
    if term.op == "where":
        if args[0] == "linear":
            return "other"
        values = args[1:]
    elif term.op == "along":
        if term.attr[0] is not torch.scatter or args[1] == "linear":
            return "other"
        values = [args[0], args[2]]
    elif term.op == "reduce":
        if term.attr[0] != "sum":
            return "other"
    elif term.op not in ("add", "cat", "part"):
        return "other"
    return "linear" if all(v in ("linear", "zero") for v in values) else "other"


def _name(term: Term) -> str:
    return str(getattr(term.attr[0], "_schema", term.attr[0])).split("(")[0].split("::")[-1].split(".")[0]
