"""The stages in order, for one graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch.fx
from torch.fx import Node

from sdpa_rewrite import analyse, config, match
from sdpa_rewrite.authoring import naming, stage
from sdpa_rewrite.calls import called_sites
from sdpa_rewrite.choose import EMITTERS, Choice, choose, in_words
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.costs import UNFUSED
from sdpa_rewrite.describe import bytes_avoided, disabled, drawn_mask, form_of
from sdpa_rewrite.flex_calls import OpenedCalls, close, open_calls
from sdpa_rewrite.lift.ops import source_line
from sdpa_rewrite.outcome import Form, Outcome, Reason
from sdpa_rewrite.rewrite import Memory, Refused, rewrite
from sdpa_rewrite.site import Miss, Site
from sdpa_rewrite.twins import Reading, carried_over

FUSED, CALL, FLEX = "fused", "sdpa", "flex"
ALL_BUT = 0.9  # of a pattern found, for it to be told where the engine fuses


def rewrite_graph(graph: torch.fx.Graph) -> tuple[Outcome, ...]:
    """Rewrite every attention of ``graph`` that is proved and that an emitter takes; tell what became of each.

    Patterns come first.  All candidates that are left are judged on the graph as it is then, and the sites rewritten
    one by one.
    """
    flexible = open_calls(graph, config.upgrade_calls and FUSED in config.emitters)
    try:
        return _rewrite_opened(graph, flexible)
    except BaseException:
        for call in flexible.opened:
            close(graph, call, fused=False)
        raise


def _rewrite_opened(graph: torch.fx.Graph, flexible: OpenedCalls) -> tuple[Outcome, ...]:
    written = set(graph.nodes)
    taught = stage.apply(graph)
    order = {node: k for k, node in enumerate(graph.nodes)}
    analysis = Analysis(order)
    candidates = list(match.candidates(graph))
    verdicts = [(c, c.anchor.name, source_line(c.anchor), analysis.verdict(c)) for c in candidates]
    calls_of = [flexible.of(c.product) for c in candidates]
    # not the calls of a pattern's replacement: its author chose them
    calls = [site for site in _calls(graph) if site.scores_node in written]
    sites = [*calls, *(verdict for *_, verdict in verdicts if isinstance(verdict, Site))]
    memory = Memory(frozenset(n for site in sites for n in site.operands))
    known = {n for c in candidates for n in (c.anchor, c.product)}
    elsewhere = taught.declined_elsewhere(known) + taught.refuted_elsewhere(known)
    nearly = [functools.partial(taught.nearest, c.anchor, c.product) for c in candidates]
    upgraded = [o for site in calls for o in _upgraded(graph, site, order, memory)]
    outcomes = [
        _rewritten(graph, verdict, order, memory, name, source, FLEX if call and not call.training else UNFUSED)
        if isinstance(verdict, Site)
        else Outcome("missed", name, source, reasons=(verdict,))
        for (_, name, source, verdict), call in zip(verdicts, calls_of, strict=True)
    ]
    fused = [call for call, outcome in zip(calls_of, outcomes, strict=True) if call and outcome.status == FUSED]
    for call in flexible.opened:
        close(graph, call, call in fused)
    told = (
        _with_patterns(outcome, taught.declining(c.anchor), near)
        for c, outcome, near in zip(candidates, outcomes, nearly, strict=True)
    )
    return (*taught.outcomes, *elsewhere, *flexible.closed, *upgraded, *told)


def _calls(graph: torch.fx.Graph) -> Iterator[Site]:
    if config.upgrade_calls and FUSED in config.emitters:
        yield from called_sites(graph)


def _with_patterns(outcome: Outcome, declined: Outcome | None, nearly: Callable[..., str]) -> Outcome:
    """What the patterns say about a candidate: the one that it is, or nearly is (all but, where it is fused)."""
    if declined is not None:
        says = "; ".join(map(str, declined.reasons))
        return dataclasses.replace(outcome, details={**outcome.details, **declined.details, "pattern says": says})
    nearest = nearly(least=ALL_BUT if outcome.status == FUSED else 0.0)
    details = {**outcome.details, "nearest pattern": nearest} if nearest else outcome.details
    return dataclasses.replace(outcome, details=details)


class Analysis:
    """Judges candidates of one graph; a layer that repeats another is not proved again."""

    def __init__(self, order: dict[Node, int]) -> None:
        self.order = order
        self.known: list[tuple[Site, Reading]] = []

    def verdict(self, candidate: match.Candidate) -> Site | Reason:
        """The certified site, or why there is none."""
        try:
            for site, reading in self.known:
                again = carried_over(site, reading, candidate.product)
                if again is not None:
                    return again
            with clean_room():
                found = analyse.analysed(candidate, self.order)
            self.known.append(found)
            return found[0]
        except Miss as miss:
            node = miss.node if miss.node is not None else candidate.anchor
            return Reason(miss.text, miss.role, node.name, source_line(node) or source_line(candidate.anchor))
        except Exception as error:
            if config.strict:
                raise
            return Reason(f"analysis failed: {type(error).__name__}: {error}")


def _named(form: Form, site: Site) -> Form:
    """The form with its name in the library."""
    try:
        return dataclasses.replace(form, name=naming.name_of(site))
    except Miss:  # what the site reads cannot be opened further, so no form of the library has it
        return form
    except Exception:
        if config.strict:
            raise
        return form


def _upgraded(graph: torch.fx.Graph, site: Site, order: dict[Node, int], memory: Memory) -> Iterator[Outcome]:
    """What became of an attention that is a call already; nothing to tell where it stays what it was."""
    if EMITTERS[FUSED].reasons_against(site):
        return
    name, source = site.scores_node.name, source_line(site.scores_node)
    with config.patch(emitters=(FUSED,)):
        yield _rewritten(graph, site, order, memory, name, source, now=CALL)


def _rewritten(
    graph: torch.fx.Graph,
    site: Site,
    order: dict[Node, int],
    memory: Memory,
    name: str,
    source: str,
    now: str = UNFUSED,
) -> Outcome:
    form = _named(form_of(site), site)
    unwanted = disabled(form, site.training)
    if unwanted:
        reason = Reason(f"config.disabled_forms has {unwanted!r}", "config")
        return Outcome("recognised", name, source, site.training, form, reasons=(reason,))
    mask = drawn_mask(site)
    if mask is not None:  # as under config.fallback_random: the mask is eager's own
        text = "torch's own generator draws the dropout mask beside the probabilities (fallback_random)"
        reason = Reason(text, "weight", mask.name, source_line(mask))
        return Outcome("recognised", name, source, site.training, form, reasons=(reason,))
    # what is a call of FlexAttention becomes ours or that call again
    choice = choose(site, now, (FUSED,) if now == FLEX else config.emitters)
    emitter, details = choice.emitter, _times(site, choice)
    reasons = tuple(Reason(text, role) for role, texts in choice.against.items() for text in texts)
    if emitter is None:
        return Outcome("recognised", name, source, site.training, form, reasons=reasons, details=details)
    avoided = bytes_avoided(site)
    try:
        rewrite(graph, site, emitter, order, memory)
    except Exception as error:
        if config.strict and not isinstance(error, Refused):
            raise
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        return Outcome("recognised", name, source, site.training, form, reasons=(*reasons, Reason(text, emitter.name)))
    return Outcome("fused", name, source, site.training, form, emitter.name, bytes_avoided=avoided, details=details)


def _times(site: Site, choice: Choice) -> dict[str, str]:
    if not choice.seconds or choice.work is None:
        return {}
    text = ", ".join(f"{kind} {in_words(t)}" for kind, t in choice.seconds.items())
    if all(isinstance(a.size, int) for a in (*site.rows, *site.columns)):
        return {"estimated": text}
    return {"estimated": f"{text} (for {choice.work.rows} x {choice.work.columns})"}
