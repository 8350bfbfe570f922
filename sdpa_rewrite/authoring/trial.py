"""A pattern tried on its own function: whether it is found in what that computes with numbers for its scalars."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node
from torch.utils import _pytree as pytree

from sdpa_rewrite.authoring.describe import diagnosis
from sdpa_rewrite.authoring.lifted import LiftedPattern, head, lifted_variants
from sdpa_rewrite.authoring.opener import Opener
from sdpa_rewrite.authoring.parameters import Variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.authoring.region import Near, regions_at
from sdpa_rewrite.authoring.trace import output_of, traced
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.lift.lifter import Axes


def obstacle(pattern: Pattern, numbers: Mapping[str, float]) -> str:
    """What keeps ``pattern`` from matching its own function with ``numbers`` for scalars; empty where it does match.

    Operators and axes are compared, nothing is proved.  Raises ``PatternError``.
    """
    return next(filter(None, (_obstacle(lifted, numbers) for lifted in lifted_variants(pattern))), "")


def _obstacle(lifted: LiftedPattern, numbers: Mapping[str, float]) -> str:
    given = {p.name: numbers[p.name] for p in lifted.variant.parameters if p.name in numbers}
    left = tuple(p for p in lifted.variant.parameters if p.name not in given)
    with clean_room():
        graph, _, _ = traced(lifted.name, lifted.function, Variant(left, {**lifted.variant.fixed, **given}), False)
        returned = pytree.tree_leaves(output_of(graph))
        result = returned[lifted.kept[0]]
        assert isinstance(result, Node)
        found = list(regions_at(lifted, head(result), Opener(Axes()), closely=True))
    nearest = found[-1] if found else None
    return diagnosis(nearest) if isinstance(nearest, Near) and len(found) == 1 else ""
