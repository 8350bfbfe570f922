"""What became of each candidate: counters, log, trace artifact, and the ``Report`` that ``explain`` returns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from sdpa_rewrite import config
from sdpa_rewrite.outcome import Form, Outcome, Reason

log = logging.getLogger("sdpa_rewrite")


# -- collecting ----------------------------------------------------------------------------------------------


@dataclass
class Collected:
    """What the pass told while ``collect`` listened."""

    sites: list[Outcome] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    graphs: int = 0


_listeners: ContextVar[tuple[Collected, ...]] = ContextVar("sdpa_rewrite listeners", default=())


@contextlib.contextmanager
def collect() -> Iterator[Collected]:
    """Collect the outcomes of all graphs that this thread compiles in the block (not of those a cache serves)."""
    collected = Collected()
    token = _listeners.set((*_listeners.get(), collected))
    try:
        yield collected
    finally:
        _listeners.reset(token)


def record(outcomes: Sequence[Outcome]) -> None:
    """Take in the outcomes of one graph: counters, log, trace artifact and whoever collects."""
    for listener in _listeners.get():
        listener.graphs += 1
        listener.sites.extend(outcomes)
    _counters().update(_counts(outcomes))
    for outcome in outcomes:
        log.info("%s", _line(outcome))
        log.debug("%s", "\n".join(_details(outcome)))
    _trace(outcomes)


def record_failure(error: Exception) -> None:
    """Take in that the pass failed on a graph, which stays as it was."""
    text = f"{type(error).__name__}: {error}"
    for listener in _listeners.get():
        listener.graphs += 1
        listener.failures.append(text)
    _counters().update({"graphs": 1, "failed": 1, f"failed: {type(error).__name__}": 1})
    log.warning("the graph is compiled as written, since rewriting its attention failed (%s)", text)
    log.debug("the failure", exc_info=error)


def _counters() -> Counter[str]:
    from torch._dynamo.utils import counters

    ours: Counter[str] = counters["sdpa_rewrite"]
    return ours


def _counts(outcomes: Sequence[Outcome]) -> Counter[str]:
    """``graphs``, ``fused``, ``recognised``, ``missed``, and of these ``fused: <emitter>``, ``missed: <reason>``."""
    counts = Counter({"graphs": 1})
    for outcome in outcomes:
        counts[outcome.status] += 1
        if outcome.status == "fused":
            counts[f"fused: {outcome.emitter}"] += 1
        counts.update({f"{outcome.status}: {text}" for text in _reason_texts(outcome)})
    return counts


def _reason_texts(outcome: Outcome) -> set[str]:
    return {reason.text for reason in outcome.reasons}


def _trace(outcomes: Sequence[Outcome]) -> None:
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "sdpa_rewrite", "encoding": "json"},
        payload_fn=lambda: Report(tuple(outcomes), graphs=1).to_json(),
    )


# -- the report ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What became of the attention of one function.

    ``sites``: one ``Outcome`` per candidate, in the order of compilation.  ``failures``: what the pass itself
    failed with, one text for each graph where it did; those graphs are compiled as written.
    """

    sites: tuple[Outcome, ...] = ()
    failures: tuple[str, ...] = ()
    graphs: int = 0

    def __str__(self) -> str:
        rows = list(Counter(map(_Row.of, self.sites)).items())
        lines = [self._summary(), *(f"the pass failed on a graph: {text}" for text in self.failures)]
        if rows:
            lines += ["", *_table(rows)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it as JSON; what JSON does not know is written as its text."""
        return json.dumps({**dataclasses.asdict(self), "sites": list(map(dataclasses.asdict, self.sites))}, default=str)

    def _summary(self) -> str:
        count = Counter(site.status for site in self.sites)
        parts = [f"{count[status]} {status}" for status in ("fused", "recognised", "missed")]
        avoided = sum(site.bytes_avoided for site in self.sites)
        saved = f"; {_bytes(avoided)} of score-sized tensors avoided" if avoided else ""
        sites, graphs = _plural(len(self.sites), "attention site"), _plural(self.graphs, "graph")
        return f"{sites} in {graphs}: {', '.join(parts)}{saved}"


@dataclass(frozen=True)
class _Row:
    """A line of the table and what stands under it.  Equal sites, such as those of equal layers, share one."""

    cells: tuple[str, ...]
    details: tuple[str, ...]

    @staticmethod
    def of(site: Outcome) -> _Row:
        graph = "forward+backward" if site.training else "forward"
        saved = _bytes(site.bytes_avoided) if site.bytes_avoided else "-"
        return _Row((_verdict(site), graph, saved, site.source or site.node), tuple(_details(site)))


_HEADER = ("#", "sites", "outcome", "graph", "avoided", "source")


def _table(rows: Sequence[tuple[_Row, int]]) -> Iterator[str]:
    lines = [(str(number), str(count), *row.cells) for number, (row, count) in enumerate(rows, 1)]
    widths = [max(map(len, column)) for column in zip(_HEADER, *lines, strict=True)]
    yield _aligned(_HEADER, widths)
    for cells, (row, _) in zip(lines, rows, strict=True):
        yield _aligned(cells, widths)
        yield from (f"{'':{widths[0]}}  {detail}" for detail in row.details)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _verdict(site: Outcome) -> str:
    if site.status == "fused":
        return f"fused by {'our kernel' if site.emitter == 'fused' else site.emitter}"
    return "recognised, not fused" if site.status == "recognised" else "missed"


def _line(site: Outcome) -> str:
    why = "; ".join(map(str, site.reasons))
    return f"{_verdict(site)}: {site.source or site.node}" + (f": {why}" if why else "")


def _details(site: Outcome) -> Iterator[str]:
    if site.form is not None:
        yield f"form: {describe(site.form)}"
    if "estimated" in site.details:
        yield f"estimated: {site.details['estimated']}"
    yield from (f"why not: {_explained(reason)}" for reason in site.reasons)
    if "pattern says" in site.details:
        yield f"pattern {site.details['pattern']}: {site.details['pattern says']}"
    if "nearest pattern" in site.details:
        yield f"nearest pattern: {site.details['nearest pattern']}"


def _explained(reason: Reason) -> str:
    places = {"role": reason.role, "node": reason.node, "line": reason.source}
    where = ", ".join(f"{name} {value}" for name, value in places.items() if value)
    return f"{reason.text} ({where})" if where else reason.text


def describe(form: Form) -> str:
    """A form in words: ``softmax, scale 1/8, causal mask, gqa 4:1, float16``."""
    parts = [form.name, form.softmax, f"scale {form.scale}", f"mask {form.mask}"]
    parts += [f"score {step}" for step in form.score] + [f"weight {step}" for step in form.weight]
    parts += [f"gqa {form.gqa}"] if form.gqa else []
    parts += [f"dropout {form.dropout:g}"] if form.dropout else []
    parts += [f"gradients of {', '.join(form.gradients)}"] if form.gradients else []
    return ", ".join(part for part in (*parts, form.dtype, form.shape) if part)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _bytes(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and (larger := next(units, "")):
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


# -- the log -------------------------------------------------------------------------------------------------


def _log_to_stderr(level: str) -> None:
    """What ``config.log`` (``SDPA_REWRITE_LOG``) asks for."""
    name = {"1": "INFO", "0": "", "true": "INFO"}.get(level.lower(), level.upper())
    if not name:
        return
    if not isinstance(logging.getLevelName(name), int):
        print(f"sdpa_rewrite: SDPA_REWRITE_LOG={level}: no such level", file=sys.stderr)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(name)


_log_to_stderr(config.log)
