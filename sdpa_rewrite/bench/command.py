"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sdpa_rewrite import hook
from sdpa_rewrite.bench import machine, memory, peak, table
from sdpa_rewrite.bench.calibrate import calibrate
from sdpa_rewrite.bench.case import Case
from sdpa_rewrite.bench.contenders import NAMES, Step, Unavailable, exact, first_run, step, wrong_by
from sdpa_rewrite.bench.measure import Call, interleaved, medians, ratios
from sdpa_rewrite.bench.result import Result, judged, to_json
from sdpa_rewrite.bench.suites import DTYPES, SUITES, Scope

PLOTTED = (256, 512, 1024, 2048, 4096)
"""The lengths of a picture where none are given."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser("python -m sdpa_rewrite", description="What the rewriting gains on this machine.")
    commands = out.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure eager, stock, SDPA, FlexAttention and ours side by side")
    bench.add_argument("--suite", action="append", choices=list(SUITES), help="may be repeated; all where not given")
    bench.add_argument("--dtype", action="append", choices=["float32", "bfloat16", "float16"], help="may be repeated")
    bench.add_argument("--threads", type=int, help="torch's own choice where not given")
    bench.add_argument("--repeats", type=int, default=15, help="rounds of interleaved runs (15)")
    bench.add_argument("--lengths", type=int, nargs="+", default=[], help="sequence lengths instead of the suite's")
    bench.add_argument("--only", default="", help="only cases whose line holds this text")
    bench.add_argument("--quick", action="store_true", help="tiny sizes and no bars: to see that it runs")
    bench.add_argument("--json", metavar="FILE", help="write all figures")
    bench.add_argument("--plot", metavar="FILE", help="draw time and memory against the length (the plot extra)")
    calibrate = commands.add_parser("calibrate", help="measure what decides between fused and unfused code on CPU")
    calibrate.add_argument("--out", metavar="FILE", default="costs.json", help="where to write the costs (costs.json)")
    calibrate.add_argument(
        "--check", action="store_true", help="only compare the costs that hold with what is measured"
    )
    calibrate.add_argument(
        "--dtype", action="append", choices=["float32", "bfloat16", "float16"], help="all if not given"
    )
    calibrate.add_argument("--threads", type=int, nargs="+", help="1 and torch's own choice where not given")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code is 1 where a bar was missed or a result is wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if options.command == "calibrate":
        return _calibrate(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    about = {"command": shlex.join(["python", "-m", "sdpa_rewrite", *given]), **machine.describe()}
    lengths = tuple(options.lengths) or (PLOTTED if options.plot and not options.quick else ())
    dtypes = [getattr(torch, name) for name in options.dtype] if options.dtype else DTYPES
    scope = Scope(dtypes, lengths, options.quick)
    print(table.header(about), table.legend(), memory.HOW, sep="\n\n", flush=True)
    results: list[Result] = []
    with _own_state():
        for name in options.suite or list(SUITES):
            found = _suite(name, scope, options.only, options.repeats)
            print(f"\n{name}\n{table.table(found)}", flush=True)
            results += found
    print("", *filter(None, [table.missing(results), table.summary(results)]), sep="\n")
    if options.json:
        Path(options.json).write_text(to_json(about, results))
    if options.plot:
        from sdpa_rewrite.bench.plot import plot

        plot(results, options.plot, f"{about['command']}\n{about['machine']}, {about['threads']} threads")
    return 0 if all(r.passed for r in results) else 1


def _calibrate(options: argparse.Namespace) -> int:
    dtypes = [getattr(torch, name) for name in options.dtype or ("float32", "bfloat16", "float16")]
    threads = options.threads or sorted({1, torch.get_num_threads()})
    with _own_state():
        return calibrate(options.out, options.check, dtypes, threads)


@contextmanager
def _own_state() -> Iterator[None]:
    """Stock is stock, and no cache hides what became of a site."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    was = hook.is_enabled()
    logs = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor")]
    levels = [log.level for log in logs]
    hook.disable()
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        if was:
            hook.enable()


def _suite(name: str, scope: Scope, only: str, repeats: int) -> list[Result]:
    cases = [c for c in SUITES[name](scope) if only in c.name]
    results = []
    for number, case in enumerate(cases, 1):
        results.append(measured(case, repeats, f"{name} {number}/{len(cases)} {case.name}"))
    _progress("", "")
    return results


def measured(case: Case, repeats: int, label: str = "") -> Result:
    """Run a case all ways that there are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = case.inputs()
    cotangent = torch.randn_like(case.written(*inputs)) if case.training else None
    with torch.set_grad_enabled(case.training):
        ready = _compiled(case, inputs, cotangent, label)
        _progress(label, "measuring")
        calls: dict[str, Call] = dict(ready.steps)
        burst, operations = peak.burst(case.dtype)
        times = interleaved({**calls, "peak": burst}, repeats)
        found = {name: memory.peak_bytes(call) for name, call in calls.items()}
    seconds = medians(times)
    rate = operations / seconds.pop("peak")
    own = seconds.get("ours")
    result = Result(
        suite=case.suite,
        name=case.name,
        form=case.form,
        dtype=case.type,
        training=case.training,
        length=case.length,
        seconds=seconds,
        ratios={n: x for n, x in ratios(times, "ours").items() if n != "peak"} if own else {},
        memory={name: count for name, count in found.items() if count is not None},
        fraction=case.operations / own / rate if own and case.operations else None,
        missing=ready.missing,
        kernel=ready.kernel,
        reasons=ready.reasons,
        difference=ready.difference,
    )
    return judged(result, case)


@dataclass
class _Ready:
    """The contenders of a case after their first run, and what that told."""

    steps: dict[str, Step] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    kernel: str = ""
    reasons: tuple[str, ...] = ()
    difference: float = 0.0


def _compiled(case: Case, inputs: list[Tensor], cotangent: Tensor | None, label: str) -> _Ready:
    ready = _Ready()
    outputs = {}
    for name in NAMES:
        _progress(label, f"compiling {name}")
        try:
            made = step(name, case, inputs, cotangent)
            first = first_run(made)
        except Unavailable as reason:
            ready.missing[name] = str(reason)
        except Exception as error:
            if name not in ("flex", "ours"):  # FlexAttention has its limits; what ours cannot do counts against it
                raise
            ready.missing[name] = f"{case.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            ready.steps[name], outputs[name] = made, first.results
            if name == "ours":
                ready.kernel, ready.reasons = first.kernel, first.reasons
    if "ours" in outputs:
        right = partial(exact, case, inputs, cotangent)
        ready.difference = wrong_by(outputs["ours"], outputs["stock"], right, case.type)
    return ready


def _progress(label: str, doing: str) -> None:
    """A line on stderr that is written over; where that is a file, a line for each case."""
    if sys.stderr.isatty():
        print(f"\r\033[K{label}: {doing}" if label else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif doing == "measuring":
        print(label, file=sys.stderr, flush=True)
