"""The benchmarks: what they compute from times, how they judge and print, and one tiny case from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdpa_rewrite.bench import command, contenders, forms, memory, peak, plot, table
from sdpa_rewrite.bench.case import Bar, Case
from sdpa_rewrite.bench.contenders import LARGEST_DIFFERENCE, difference, exact, wrong_by
from sdpa_rewrite.bench.forms import Form, Size
from sdpa_rewrite.bench.measure import SAMPLE, interleaved, medians, ratios
from sdpa_rewrite.bench.models import Bert, Gpt, pair
from sdpa_rewrite.bench.result import Result, judged, to_json
from sdpa_rewrite.bench.suites import SUITES, Scope

FORMS = [x for x in vars(forms).values() if isinstance(x, Form)]
RESULT = Result(
    suite="forward",
    name="full forward 1x8 N=64 D=64 float32",
    form="full",
    dtype="float32",
    training=False,
    length=64,
    seconds={"eager": 0.004, "stock": 0.003, "sdpa": 0.002, "ours": 0.001},
    ratios={"eager": 4.0, "stock": 3.0, "sdpa": 2.0},
    memory={"stock": 6 * 2**20, "ours": 2**20},
    fraction=0.5,
    missing={"flex": "inference only on CPU"},
    kernel="fused",
)


def with_bars(*bars: Bar) -> Case:
    return dataclasses.replace(next(SUITES["forward"](Scope(quick=True))), bars=bars)


class Clock:
    """Time that passes only in calls."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        costs = itertools.cycle(seconds)

        def call() -> None:
            self.now += next(costs)
            self.calls += name

        return call


# -- times -----------------------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    clock = Clock()
    times = interleaved({"a": clock.work("a", 1.0), "b": clock.work("b", 2.0)}, 3, clock)
    assert clock.calls == "aabb" + "ab" * 3  # two calls each that do not count
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_what_is_short_is_called_many_times_in_a_sample() -> None:
    clock = Clock()
    times = interleaved({"a": clock.work("a", SAMPLE / 10)}, 2, clock)
    assert len(clock.calls) == pytest.approx(2 + 2 * 10, abs=2)
    assert times["a"] == pytest.approx([SAMPLE / 10] * 2)


def test_medians_and_ratios_by_round() -> None:
    times = {"ours": [1.0, 10.0, 2.0], "stock": [3.0, 30.0, 8.0]}
    assert medians(times) == {"ours": 2.0, "stock": 8.0}
    assert ratios(times, "ours") == {"stock": 3.0}


# -- verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bar", "measured", "passed"),
    [
        (Bar("speed", 1.65, "sdpa"), 2.0, True),
        (Bar("speed", 3.3, "sdpa"), 2.0, False),
        (Bar("memory", 1 / 6, "stock"), 1 / 6, True),
        (Bar("memory", 1 / 8, "stock"), 1 / 6, False),
        (Bar("peak", 0.65), 0.5, False),
        (Bar("peak", 0.5), 0.5, True),
        (Bar("speed", 1.0, "flex"), None, False),
        (Bar("memory", 1.0, "flex"), None, False),
    ],
)
def test_a_bar_is_judged(bar: Bar, measured: float | None, passed: bool) -> None:
    result = judged(RESULT, with_bars(bar))
    (verdict,) = result.verdicts
    assert (verdict.measured, verdict.passed) == (measured, passed)
    assert result.passed is passed
    assert str(bar) in str(verdict)


def test_wrong_results_pass_no_bar() -> None:
    wrong = judged(dataclasses.replace(RESULT, difference=0.1), with_bars(Bar("speed", 1.0, "stock")))
    assert not wrong.passed
    assert "FAIL: results differ" in table.table([wrong])
    assert table.summary([wrong]) == "1 of 1 bars reached; 1 cases with wrong results or none"


def test_ours_that_does_not_run_fails() -> None:
    bare = dataclasses.replace(RESULT, seconds={"eager": 1.0}, ratios={}, missing={"ours": "InductorError: no"})
    result = judged(bare, with_bars())
    assert not result.passed
    assert "FAIL: ours did not run" in table.table([result])


def test_the_difference_is_a_share_of_the_largest_value() -> None:
    a, b = torch.tensor([1.0, 4.0]), torch.tensor([1.5, 4.0])
    assert difference((a,), (b,)) == 0.125
    assert difference((torch.empty(0),), (torch.empty(0),)) == 0.0
    assert difference((a * float("nan"),), (b,)) == math.inf


def test_results_far_from_stocks_are_compared_with_float64() -> None:
    """Logits far apart, in bf16: what rounds the scores is far from what does not."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 32).bfloat16() for _ in range(3))
    case = dataclasses.replace(with_bars(), dtype=torch.bfloat16, written=forms.sharp)
    stock = (case.written(q, k, v),)

    def float64() -> tuple[torch.Tensor, ...]:
        return exact(case, [q, k, v], None)

    right = float64()[0].bfloat16()
    assert difference((right,), stock) > LARGEST_DIFFERENCE["bfloat16"]
    assert wrong_by((right,), stock, float64, case.type) < 0.01
    assert wrong_by((right + 1,), stock, float64, case.type) > LARGEST_DIFFERENCE["bfloat16"]


def test_exact_results_have_gradients_and_leave_the_model_as_it_is() -> None:
    model = torch.nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    case = dataclasses.replace(with_bars(), written=model, training=True)
    out, *gradients = exact(case, [x], torch.ones(4, 2))
    assert [t.dtype for t in (out, *gradients)] == [torch.float64] * 4
    assert model.weight.dtype == torch.float32
    torch.testing.assert_close(gradients[0].float(), model.weight.sum(0).expand(4, 3))


def test_bars_hold_for_the_suites_own_sizes_only() -> None:
    for name, suite in SUITES.items():
        whole = [c for c in suite(Scope()) if c.bars]
        assert bool(whole) == (name in ("forward", "training", "masks", "calls", "short")), name
        assert not any(c.bars for c in suite(Scope(quick=True)))
        assert not any(c.bars for c in suite(Scope(lengths=(128,))))


def test_ours_is_given_the_call_in_the_suite_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, str]] = []
    monkeypatch.setattr(contenders, "_compiled", lambda function, backend: given.append((function, backend)))
    for case in SUITES["calls"](Scope((torch.float32,), quick=True)):
        contenders.step("ours", case, case.inputs(), None)
        function, backend = given.pop()
        assert backend == "sdpa_rewrite"
        assert (function is case.sdpa) == ("SDPA" in case.name)
        assert (getattr(function, "__name__", "") == "call") == ("FlexAttention" in case.name)


def test_lengths_are_obeyed() -> None:
    for suite in SUITES.values():
        assert {c.length for c in suite(Scope(lengths=(32, 48), quick=True))} == {32, 48}


# -- the forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [f for f in FORMS if f.sdpa and "dropout" not in f.name], ids=lambda f: f.name)
def test_the_call_does_what_is_written(form: Form) -> None:
    for size in (Size(2, 4, 300, 8), *([Size(2, 4, 3, 8, 40, 2)] if form is forms.FULL else [])):
        given = form.inputs(size, torch.float32, False)
        assert form.sdpa is not None
        torch.testing.assert_close(form.sdpa(*given), form.written(*given))


@pytest.mark.parametrize("form", [f for f in FORMS if "dropout" not in f.name], ids=lambda f: f.name)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_flex_attention_does_what_is_written(form: Form) -> None:
    given = form.inputs(Size(2, 4, 300, 8), torch.float32, False)
    torch.testing.assert_close(form.as_flex(*given)(*given), form.written(*given))


@pytest.mark.parametrize("kind", [Bert, Gpt])
def test_a_block_that_calls_has_the_same_weights(kind: type) -> None:
    written, called = (x.eval() for x in pair(kind, 32, 4, 0.1, torch.float32))
    x = [torch.randn(2, 10, 32), *([torch.arange(10) < torch.tensor([[10], [5]])] if kind is Bert else [])]
    torch.testing.assert_close(written(*x), called(*x))


# -- what is written -------------------------------------------------------------------------------------------


def test_a_table() -> None:
    text = table.table([judged(RESULT, with_bars(Bar("speed", 1.65, "sdpa"), Bar("peak", 0.65)))])
    head, line, *verdicts = text.splitlines()
    assert head.split()[:3] == ["case", "eager", "ms"]
    assert line.split()[6:11] == ["4.00", "3.00", "2.00", "-", "1.00"]
    assert line.split()[-2:] == ["50%", "fused"]
    assert verdicts == [
        "    pass: 2 (at least 1.65x as fast as sdpa)",
        "    FAIL: 0.5 (at least 65% of the peak)",
    ]
    beyond = judged(RESULT, with_bars(Bar("speed", 4.8, "sdpa")))
    assert "    FAIL: 2 (at least 4.8x as fast as sdpa, which takes 120% of the peak)" in table.table([beyond])
    assert table.missing([RESULT, RESULT]) == "not run: flex: inference only on CPU"


def test_what_was_left_to_stock_is_told() -> None:
    text = table.table([dataclasses.replace(RESULT, kernel="stock", reasons=("too short",))])
    assert text.splitlines()[-1] == "    left: too short"


def test_json_holds_everything() -> None:
    data = json.loads(to_json({"torch": "2"}, [judged(RESULT, with_bars(Bar("speed", 1.0, "flex")))]))
    assert data["about"] == {"torch": "2"}
    (found,) = data["results"]
    assert found["seconds"]["ours"] == 0.001
    assert found["verdicts"][0]["measured"] is None


def test_a_picture_is_by_length() -> None:
    found = plot.series([dataclasses.replace(RESULT, length=n) for n in (128, 64)], "memory")
    assert found == {
        "full forward float32": {"stock": [(64, 6291456), (128, 6291456)], "ours": [(64, 2**20), (128, 2**20)]}
    }


# -- the machine -----------------------------------------------------------------------------------------------


def test_peak_memory_sees_what_a_call_touches() -> None:
    found = memory.peak_bytes(lambda: torch.ones(2**23).sum())
    if found is None:
        pytest.skip("this system does not tell a process its peak")
    assert 30 * 2**20 < found < 48 * 2**20


@pytest.mark.codegen
def test_the_peak_of_the_machine() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call, operations = peak.burst(dtype)
        call()
        assert operations >= 1e6


@pytest.mark.codegen
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_case_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    arguments = ["bench", "--suite", "training", "--quick", "--repeats", "2", "--dtype", "float32"]
    assert command.main([*arguments, "--only", "dropout", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("command  python -m sdpa_rewrite bench --suite training --quick")
    assert "no bars here" in out
    (found,) = json.loads(path.read_text())["results"]
    assert set(found["seconds"]) == {"eager", "stock", "sdpa", "ours"}
    assert found["missing"] == {"flex": "inference only on CPU"}
    assert found["kernel"] == "fused"
