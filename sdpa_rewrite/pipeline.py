"""The stages in order, for one graph."""

from __future__ import annotations

import torch.fx
from torch.fx import Node

from sdpa_rewrite import analyse, config, match
from sdpa_rewrite.choose import choose
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.describe import bytes_avoided, form_of
from sdpa_rewrite.lift.ops import source_line
from sdpa_rewrite.outcome import Outcome, Reason
from sdpa_rewrite.rewrite import Refused, rewrite
from sdpa_rewrite.site import Miss, Site


def rewrite_graph(graph: torch.fx.Graph) -> tuple[Outcome, ...]:
    """Rewrite every attention of ``graph`` that is proved and that an emitter takes; tell what became of each."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    return tuple(outcome_of(graph, candidate, order) for candidate in list(match.candidates(graph)))


def outcome_of(graph: torch.fx.Graph, candidate: match.Candidate, order: dict[Node, int]) -> Outcome:
    """Certify one candidate, choose an emitter and rewrite."""
    name, source = candidate.anchor.name, source_line(candidate.anchor)
    try:
        with clean_room():
            site = analyse.certified(candidate, order)
    except Miss as miss:
        node = miss.node
        reason = Reason(miss.text, miss.role, node.name if node is not None else "", source_line(node))
        return Outcome("missed", name, source, reasons=(reason,))
    except Exception as error:
        if config.strict:
            raise
        return Outcome("missed", name, source, reasons=(Reason(f"analysis failed: {type(error).__name__}: {error}"),))
    return _rewritten(graph, site, order, name, source)


def _rewritten(graph: torch.fx.Graph, site: Site, order: dict[Node, int], name: str, source: str) -> Outcome:
    form = form_of(site)
    emitter, against = choose(site)
    reasons = tuple(Reason(text, role) for role, texts in against.items() for text in texts)
    if emitter is None:
        return Outcome("recognised", name, source, site.training, form, reasons=reasons)
    avoided = bytes_avoided(site)
    try:
        rewrite(graph, site, emitter, order)
    except Exception as error:
        if config.strict and not isinstance(error, Refused):
            raise
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        return Outcome("recognised", name, source, site.training, form, reasons=(*reasons, Reason(text, emitter.name)))
    return Outcome("fused", name, source, site.training, form, emitter.name, bytes_avoided=avoided)
