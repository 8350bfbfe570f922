"""The cost model: what is estimated, that the smaller estimate decides, and that the costs are found from times."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sdpa_rewrite
from sdpa_rewrite import config, costs, graph_pass, report
from sdpa_rewrite.algebra.hints import LONG
from sdpa_rewrite.bench import calibrate as calibration
from sdpa_rewrite.bench.calibrate import Sample, check, fitted
from sdpa_rewrite.bench.command import main
from sdpa_rewrite.bench.forms import Size
from sdpa_rewrite.costs import COUNTS, Work
from sdpa_rewrite.processor import instruction_set
from tests.conftest import attention, inputs
from tests.harness import compiled

Function = Callable[..., Tensor]


def written(path: Path, **nanoseconds: float) -> str:
    """A file in which a call of each kind of code takes so long, whatever its size."""
    own = {kind: [n] + [0.0] * (len(COUNTS) - 1) for kind, n in nanoseconds.items()}
    table = {instruction_set(): {"float32": {"forward": own, "training": own}}}
    path.write_text(json.dumps(table))
    return str(path)


def outcome(function: Function, *args: Tensor, **options: Any) -> Any:
    with report.collect() as collected:
        compiled(function, **options)(*args)
    assert not collected.failures
    (only,) = collected.sites
    return only


@torch.no_grad()
def test_what_is_faster_unfused_stays_and_both_estimates_are_told(tmp_path: Path) -> None:
    file = written(tmp_path / "costs.json", stock=20_000.0, sdpa=21_500.0, fused=30_000.0, flex=40_000.0)
    args = inputs()
    left = outcome(attention, *args, costs=file)
    assert left.status == "recognised"
    assert [str(r) for r in left.reasons[:2]] == [
        "estimated at 30 us, what is there now at 20 us (config.cost_model) [fused]",
        "estimated at 21.5 us, what is there now at 20 us (config.cost_model) [sdpa]",
    ]
    assert left.details["estimated"] == "stock 20 us, fused 30 us, sdpa 21.5 us, flex 40 us"
    assert "estimated: stock 20 us, fused 30 us" in str(report.Report((left,), graphs=1))
    assert outcome(attention, *args, costs=file, cost_model=False).emitter == "fused"


@torch.no_grad()
def test_repeated_keys_were_not_measured_and_are_fused(tmp_path: Path) -> None:
    file = written(tmp_path / "costs.json", stock=20_000.0, fused=30_000.0)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))

    q, k, v = inputs()
    assert outcome(grouped, q, k[:, :1], v[:, :1], costs=file).emitter == "fused"


def test_nothing_is_estimated_beyond_what_was_measured() -> None:
    """One query and 4096 keys: far memory decides, of which the small samples know nothing."""
    near = Work("bfloat16", False, heads=32, shared=32, rows=1, columns=256, depth=128)
    far = Work("bfloat16", False, heads=32, shared=32, rows=1, columns=4096, depth=128)
    kinds = ("stock", "fused", "sdpa", "flex")
    assert all(costs.estimate(near, kind) is not None for kind in kinds)
    assert all(costs.estimate(far, kind) is None for kind in kinds)


@torch.no_grad()
def test_another_emitter_takes_what_it_is_faster_at(tmp_path: Path) -> None:
    file = written(tmp_path / "costs.json", stock=20_000.0, sdpa=10_000.0, fused=30_000.0)
    assert outcome(attention, *inputs(), costs=file).emitter == "sdpa"


@torch.no_grad()
def test_a_call_stays_where_ours_is_slower(tmp_path: Path) -> None:
    args = inputs()
    slow = written(tmp_path / "slow.json", stock=0.0, sdpa=10_000.0, fused=30_000.0)
    left = outcome(scaled_dot_product_attention, *args, costs=slow)
    assert left.status == "recognised"
    assert "estimated at 30 us, what is there now at 10 us" in str(left.reasons[0])
    fast = written(tmp_path / "fast.json", stock=0.0, sdpa=10_000.0, fused=5_000.0)
    assert outcome(scaled_dot_product_attention, *args, costs=fast).emitter == "fused"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("n", [16, 128, 2048])
def test_the_shipped_costs_fuse_self_attention(training: bool, n: int) -> None:
    args = inputs(1, 2, n, 16, requires_grad=training)
    found = outcome(attention, *args)
    assert found.emitter == "fused"
    assert found.details["estimated"].startswith("stock ")


def test_what_is_counted() -> None:
    work = Work("float32", False, heads=8, shared=2, rows=3, columns=5, depth=40, seen=0.5, draws=True)
    assert dict(zip(COUNTS, work.counts(fused=False), strict=True)) == {
        "calls": 1, "heads": 8, "products": 8 * 15 * 40, "scores": 120, "operands": 2 * 5 * 40, "draws": 120,
    }  # fmt: skip
    assert dict(zip(COUNTS, work.counts(fused=True), strict=True)) == {
        "calls": 1, "heads": 8, "products": 4 * 15 * 40, "scores": 60, "operands": 2 * 5 * 40, "draws": 60,
    }  # fmt: skip


def causal_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = (q @ k.mT).masked_fill((j > i) | (j < i - 2), -float("inf"))
    return torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_the_work_of_a_site(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks by index are counted; symbolic sizes are those of the first inputs, symbolic lengths are long."""
    found: list[Work] = []

    def kept(work: Work, kind: str) -> None:
        found.append(work)

    monkeypatch.setattr(costs, "estimate", kept)
    q, k, v = torch.randn(2, 6, 10, 8), torch.randn(2, 3, 10, 8), torch.randn(2, 3, 10, 12)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 6, *x.shape[2:]) for x in (k, v))
        return causal_window(q, k, v)

    outcome(grouped, q, k, v, dynamic=dynamic)
    if dynamic:
        seen = (1 + 255 * 3) / (256 * LONG)  # of every fourth row
        assert found[0] == Work("float32", False, 12, 6, LONG, LONG, 20, seen, draws=True)
    else:
        seen = (1 + 2 + 8 * 3) / 100
        assert found[0] == Work("float32", False, 12, 6, 10, 10, 20, seen, draws=True)


@torch.no_grad()
def test_what_is_compiled_for_all_lengths_is_judged_by_long_ones(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    kinds = {"stock": [0, 0, 0, 1.0, 0, 0], "fused": [30_000.0, 0, 0, 0.1, 0, 0]}
    file.write_text(json.dumps({"any": {"float32": {"forward": kinds}}}))
    args = inputs()
    assert outcome(attention, *args, costs=str(file), emitters=("fused",)).status == "recognised"
    found = outcome(attention, *args, costs=str(file), emitters=("fused",), dynamic=True)
    assert found.emitter == "fused"
    assert found.details["estimated"].endswith(f"(for {LONG} x {LONG})")


def test_the_key_of_the_caches_changes_with_the_costs(tmp_path: Path) -> None:
    before = graph_pass.attention_pass.uuid()
    with config.patch(costs=written(tmp_path / "costs.json", stock=1.0)):
        assert graph_pass.attention_pass.uuid() not in (None, before)
    assert graph_pass.attention_pass.uuid() == before


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path, work = tmp_path / "costs.json", Work("float32", False, 1, 1, 8, 8, 8)
    for time, nanoseconds in ((1, 20_000.0), (2, 30_000.0)):
        with config.patch(costs=written(path, fused=nanoseconds)):
            os.utime(path, ns=(time, time))
            assert costs.estimate(work, "fused") == pytest.approx(nanoseconds * 1e-9)


def test_costs_that_cannot_be_imported_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sdpa_rewrite, "costs")
    monkeypatch.setitem(sys.modules, "sdpa_rewrite.costs", None)
    assert graph_pass.attention_pass.uuid() is None


@torch.no_grad()
def test_a_file_that_holds_no_costs_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("not JSON")
    args = inputs()
    with report.collect() as collected, config.patch(costs=str(tmp_path / "costs.json")):
        out = compiled(attention, strict=False)(*args)
        assert graph_pass.attention_pass.uuid() is None
    torch.testing.assert_close(out, attention(*args))
    assert "JSONDecodeError" in collected.failures[0]


def test_costs_are_found_from_times() -> None:
    true = [30_000.0, 0.0, 0.02, 1.5, 0.0, 4.0]
    found = []
    for n, heads, draws, threads in ((16, 8, False, 1), (64, 3, True, 2), (300, 2, True, 1), (500, 8, False, 2)):
        for depth in (32, 128):
            work = Work("float32", False, heads, heads, n, n, depth, 1.0, draws)
            calls, *rest = (c * m for c, m in zip(true, work.counts(fused=True), strict=True))
            seconds = (calls + sum(rest) / threads) * 1e-9
            found.append(Sample(work, "", threads, {"fused": seconds, "stock": 2 * seconds}))
    assert fitted(found, "fused") == pytest.approx(true, rel=1e-3)
    assert all(c >= 0 for c in fitted(found, "stock"))


def test_the_check_tells_wrong_choices(tmp_path: Path) -> None:
    work = Work("float32", False, 1, 1, 8, 8, 8)
    samples = [
        Sample(work, "8", 1, {"stock": 2e-5, "fused": 1e-5}),
        Sample(work, "9", 1, {"stock": 1e-5, "fused": 2e-5}),
    ]
    with config.patch(costs=written(tmp_path / "costs.json", stock=20_000.0, fused=10_000.0)):
        *lines, verdict = check(samples)
    assert verdict == "1 of 2 chosen right, or within 5%"
    assert "which is 2.00x as slow" in lines[2]
    assert "as slow" not in lines[1]


@pytest.mark.usefixtures("no_codegen")
def test_calibrate_writes_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(calibration, "SIZES", (Size(2, 2, 8, 8), Size(2, 3, 40, 16)))
    monkeypatch.setattr(calibration, "REPEATS", 1)
    file = tmp_path / "costs.json"
    assert main(["calibrate", "--out", str(file), "--dtype", "float32", "--threads", "1"]) == 0
    found = json.loads(file.read_text())[instruction_set()]["float32"]
    assert {direction: sorted(kinds) for direction, kinds in found.items()} == {
        "forward": ["flex", "fused", "sdpa", "stock"],
        "training": ["fused", "sdpa", "stock"],
    }
    assert all(len(each) == len(COUNTS) for kinds in found.values() for each in kinds.values())
    told = capsys.readouterr().out.splitlines()
    assert (
        len(told) == 1 + 8 + 2
    )  # a heading, two sizes in two directions with dropout and without, a verdict, the file
    assert str(file) in told[-1]
