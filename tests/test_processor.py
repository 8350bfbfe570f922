"""What the CPU is taken for: the name of its costs, and how bfloat16 is multiplied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._inductor import cpu_vec_isa

from sdpa_rewrite import config, costs, processor
from sdpa_rewrite.costs import Work


class Vectors:
    """What Inductor compiles for."""

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits

    def __str__(self) -> str:
        return self.name

    def bit_width(self) -> int:
        return self.bits


def pretend(patch: pytest.MonkeyPatch, vectors: Vectors, intel: bool, bf16: bool = True, amx: bool = False) -> None:
    patch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: vectors)
    patch.setattr(processor, "is_intel", lambda: intel)
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.mark.parametrize(
    ("vectors", "intel", "bf16", "amx", "expected"),
    [
        (Vectors("avx512 avx512_vnni amx_tile", 512), True, True, True, ("tiles", "avx512-amx-intel")),
        (Vectors("avx512 avx512_vnni", 512), True, True, False, ("floats", "avx512-bf16-intel")),
        (Vectors("avx512 avx512_vnni", 512), False, True, False, ("dots", "avx512-bf16")),
        (Vectors("avx512", 512), True, False, False, ("floats", "avx512-intel")),
        (Vectors("avx2", 256), False, True, False, ("floats", "avx512-bf16")),
    ],
)
def test_what_is_best_for_bfloat16(
    vectors: Vectors, intel: bool, bf16: bool, amx: bool, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vectors, intel, bf16, amx)
    assert (processor.pairs(), processor.instruction_set()) == expected


def test_costs_of_the_same_maker_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Vectors("avx512", 512), intel=True, bf16=False)

    def estimate(dtype: str = "float32", **microseconds: float) -> float | None:
        work = Work(dtype, False, 1, 1, 10, 10, 64)
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        own = {name: {"forward": {"fused": [1e3 * n, 0, 0, 0, 0, 0]}} for name, n in microseconds.items()}
        other = {"avx2": {"bfloat16": own["avx512"]}}
        file.write_text(json.dumps({n.replace("_", "-"): {"float32": table} for n, table in own.items()} | other))
        with config.patch(costs=str(file)):
            return costs.estimate(work, "fused")

    assert estimate(avx512=3.0, avx512_bf16_intel=2.0, avx512_intel=1.0) == pytest.approx(1e-6)
    assert estimate(avx512=3.0, avx512_bf16_intel=2.0) == pytest.approx(2e-6)
    assert estimate(avx512=3.0) == pytest.approx(3e-6)
    assert estimate("bfloat16", avx512=3.0) == pytest.approx(3e-6)
    assert estimate("float16", avx512=3.0) is None
