"""The fused emitter: the graphs it makes mean what was written, forward and backward, and it says why it declines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention

from sdpa_rewrite import report
from sdpa_rewrite.kernels.op import attention, attention_backward
from sdpa_rewrite.kernels.spec import Spec
from tests.harness import compiled, same_as_eager
from tests.test_emit_flex import CASES, INFINITY, added, causal, fused_by, mask_with_empty_row, soft_cap, tensors

Function = Callable[..., Tensor]
OURS = ("fused",)


def learned(*args: Tensor) -> list[Tensor]:
    """``args``, those of floats with gradients."""
    return [x.requires_grad_() if x.is_floating_point() else x for x in args]


def spec_of(function: Function, *args: Tensor, **options: Any) -> tuple[Spec, Node]:
    """The call of the forward operator in the final graph of ``function``."""
    kept: list[GraphModule] = []
    compiled(function, keep=kept, emitters=OURS, **options)(*args)
    (node,) = (n for n in kept[0].graph.nodes if n.target is attention)
    return Spec.of(node.args[5]), node


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_inference(case: str) -> None:
    function, make = CASES[case]
    assert fused_by(same_as_eager(function, *make(), emitters=OURS)) == ["fused"]


@pytest.mark.parametrize("case", CASES)
def test_training_with_every_gradient(case: str) -> None:
    function, make = CASES[case]
    assert fused_by(same_as_eager(function, *learned(*make()), emitters=OURS)) == ["fused"]


@pytest.mark.parametrize("case", ["soft cap", "alibi from indices", "sliding window", "mask tensor, an empty row"])
def test_symbolic_shapes(case: str) -> None:
    function, make = CASES[case]
    assert fused_by(same_as_eager(function, *learned(*make()), emitters=OURS, dynamic=True)) == ["fused"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype) -> None:
    args = learned(*(x.to(dtype) for x in (*tensors(), torch.randn(4, 17, 17))))
    assert fused_by(same_as_eager(added, *args, emitters=OURS)) == ["fused"]


def test_one_operator_each_way_and_no_scores() -> None:
    kept: list[GraphModule] = []
    compiled(soft_cap, keep=kept, emitters=OURS)(*learned(*tensors()))
    targets = [[n.target for n in g.graph.nodes if n.op == "call_function"] for g in kept]
    assert sum(t.count(attention) for t in targets) == 1
    assert not any(torch.ops.aten.bmm.default in t or torch.ops.aten.exp.default in t for t in targets)


def test_nothing_of_the_size_of_the_scores_is_saved() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.dropout(causal(q @ k.mT).softmax(-1), 0.25) @ v

    kept: list[GraphModule] = []
    compiled(program, keep=kept, emitters=OURS)(*learned(*tensors(n=40, d=8)))
    (outputs,) = (n.args[0] for n in kept[0].graph.nodes if n.op == "output")
    assert max(n.meta["val"].numel() for n in outputs if isinstance(n, Node)) <= 2 * 4 * 40 * 8


def test_dropout_is_given_as_a_seed() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.dropout((q @ k.mT).softmax(-1), 0.25) @ v

    spec, node = spec_of(program, *learned(*tensors()))
    assert [x.kind for x in spec.inputs] == ["uniform"]
    (seed,) = node.args[3]  # type: ignore[misc, str-unpack]
    assert seed.meta["val"].dtype == torch.int64  # type: ignore[union-attr]
    assert seed.meta["val"].dim() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("training", [False, True])
def test_random_numbers_that_others_read_stay_a_tensor(training: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.rand(2, 4, 17, 17)
        return ((q @ k.mT).softmax(-1) * (numbers > 0.5)) @ v, numbers

    kept: list[GraphModule] = []
    given = learned(*tensors()) if training else tensors()
    with report.collect() as collected:
        out, numbers = compiled(program, keep=kept, emitters=OURS)(*given)  # type: ignore[arg-type]
    assert fused_by(collected) == ["fused"]
    (node,) = (n for n in kept[0].graph.nodes if n.target is attention)
    assert node.args[3][0].meta["val"].shape == (2, 4, 17, 17)
    q, k, v = given
    torch.testing.assert_close(out, ((q @ k.mT).softmax(-1) * (numbers > 0.5)) @ v)  # those that came out were used


def test_the_seeds_of_other_random_operators_stay() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = torch.nn.functional.dropout(q, 0.5)
        b = torch.nn.functional.dropout((a @ k.mT).softmax(-1), 0.25) @ v
        return torch.nn.functional.dropout(b, 0.5)

    def seeds(**options: Any) -> list[int]:
        kept: list[GraphModule] = []
        compiled(program, keep=kept, **options)(*learned(*tensors()))
        return [n.args[1] for n in kept[0].graph.nodes if "lookup_seed" in str(n.target)]

    assert seeds(emitters=OURS) == seeds(emitters=()) == [0, 1, 2]


def test_what_a_mask_hides_is_known() -> None:
    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        behind = torch.arange(n)[:, None] - torch.arange(n)
        return (q @ k.mT).masked_fill((behind < 0) | (behind >= 5), -INFINITY).softmax(-1) @ v

    with torch.no_grad():
        spec, node = spec_of(window, *tensors())
    assert spec.bare is None
    assert spec.visible is None
    assert [node.args[4][n] for n in (spec.low, spec.high)] == [-4, 0]  # type: ignore[index]


@torch.no_grad()
def test_a_mask_tensor_is_looked_up_and_a_soft_cap_stays_where_it_hides_nothing() -> None:
    function, make = CASES["mask tensor, an empty row"]
    spec, _ = spec_of(function, *make())
    assert spec.visible is not None
    assert spec.bare is not None
    assert spec.floor == -INFINITY


@torch.no_grad()
def test_a_negated_mask_is_read_before_it_is_negated() -> None:
    def visible(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~mask, -INFINITY).softmax(-1) @ v

    kept: list[GraphModule] = []
    mask = ~mask_with_empty_row(2, 1, 17, 17)
    assert fused_by(same_as_eager(visible, *tensors(), mask, emitters=OURS)) == ["fused"]
    torch._dynamo.reset()
    compiled(visible, keep=kept, emitters=OURS)(*tensors(), mask)
    assert not any("not" in str(n.target) for n in kept[0].graph.nodes if n.op == "call_function")


def test_a_learned_bias_is_no_mask() -> None:
    spec, _ = spec_of(added, *learned(*tensors(), torch.randn(4, 17, 17)))
    assert spec.visible is None
    assert len(spec.learned) == 1


def test_the_output_lies_as_its_reader_wants_it() -> None:
    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(2, 17, -1)

    kept: list[GraphModule] = []
    with torch.no_grad():
        compiled(merged, keep=kept, emitters=OURS)(*tensors())
    names = [str(n.target) for n in kept[0].graph.nodes if n.op == "call_function"]
    assert not any("clone" in n or "copy" in n for n in names)


# -- reasons -------------------------------------------------------------------------------------------------


def reasons(function: Function, *args: Tensor) -> list[str]:
    (site,) = same_as_eager(function, *args, emitters=OURS).sites
    assert site.status == "recognised"
    return [r.text for r in site.reasons]


@torch.no_grad()
def test_float64() -> None:
    assert reasons(soft_cap, *(x.double() for x in tensors())) == ["our kernels do not compute in torch.float64"]


@torch.no_grad()
def test_a_weight_program_that_does_not_multiply() -> None:
    def sharpened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).pow(2) @ v

    assert reasons(sharpened, *tensors()) == ["the probabilities are not only multiplied after the softmax"]


def test_a_learned_factor_of_the_probabilities() -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) * gate) @ v

    assert reasons(gated, *learned(*tensors(), torch.rand(17, 17))) == [
        "what the probabilities are multiplied by needs a gradient"
    ]


def test_backward_is_ours_too() -> None:
    kept: list[GraphModule] = []
    out = compiled(soft_cap, keep=kept, emitters=OURS)(*learned(*tensors()))
    out.sum().backward()
    assert any(n.target is attention_backward for n in kept[1].graph.nodes)


# -- attention that is a call already --------------------------------------------------------------------------


CALLS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2),
    "mask with an empty row": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=MASK),
    "grouped": lambda q, k, v: scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
}
MASK = torch.arange(17)[:, None] % 4 > torch.arange(17) % 3


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_of_sdpa_is_upgraded(case: str, training: bool) -> None:
    args = [x.requires_grad_(training) for x in tensors()]
    assert fused_by(same_as_eager(CALLS[case], *args, cost_model=False)) == ["fused"]


def test_calls_are_left_alone_where_that_is_wanted() -> None:
    for options in ({"upgrade_calls": False}, {"emitters": ("sdpa",)}):
        torch._dynamo.reset()
        assert same_as_eager(CALLS["causal"], *tensors(), **options).sites == []


def test_one_draw_compared_twice_is_read_as_two_masks() -> None:
    """The numbers alone would not tell which of the two a capture is."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = torch.rand(2, 4, 17, 17)
        weights = torch.where(numbers > 0.25, (q @ k.mT).softmax(-1), 0.0)
        return torch.where(numbers > 0.75, weights * 2.0, 0.0) @ v

    with torch.no_grad():
        spec, _ = spec_of(program, *tensors())
    assert [x.kind for x in spec.inputs] == ["tensor", "tensor"]
    assert {x.dtype for x in spec.inputs} == {"bool"}


# -- what is as large as the scores and made of less ---------------------------------------------------------------


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi (Press et al., 2022) with slopes that are a tensor."""
    i, j = positions(q, k)
    return (q @ k.mT * 0.3 + slopes[:, None, None] * (j - i)).softmax(-1) @ v


def causal_and_padded(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    i, j = positions(q, k)
    seen = (j <= i) & keys[:, None, None, :]
    return (q @ k.mT * 0.3).masked_fill(~seen, -1e9).softmax(-1) @ v


def of_rows_and_columns(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + (a[:, :, None] + b[:, None, :])).softmax(-1) @ v


def twice_with_one_bias(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    bias = a[:, :, None] + b[:, None, :]
    once = (q @ k.mT * 0.3 + bias).softmax(-1) @ v
    return (once @ k.mT * 0.3 + bias).softmax(-1) @ v


def read_by(function: Function, *args: Tensor) -> tuple[Spec, int]:
    """The call, and how much of the largest tensor that its programs read is in memory."""
    spec, node = spec_of(function, *args)
    return spec, max(x.meta["val"].untyped_storage().nbytes() for x in node.args[3])  # type: ignore[union-attr]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_bias_made_of_vectors_is_made_in_the_kernel(dynamic: bool) -> None:
    slopes, rows, columns = torch.rand(4) / 9, torch.randn(4, 17), torch.randn(4, 17)
    for function, biases in ((sloped, [slopes]), (of_rows_and_columns, [rows, columns])):
        args = learned(*tensors(), *biases)
        assert fused_by(same_as_eager(function, *args, emitters=OURS, dynamic=dynamic)) == ["fused"]
        spec, most = read_by(function, *args)
        assert most <= 4 * 4 * 17
        assert len(spec.learned) == len(biases)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_causal_mask_beside_padding_is_a_bound_and_a_vector(training: bool) -> None:
    args = [*tensors(), torch.arange(17) < torch.tensor([[17], [9]])]
    args = learned(*args) if training else args
    assert fused_by(same_as_eager(causal_and_padded, *args, emitters=OURS)) == ["fused"]
    spec, most = read_by(causal_and_padded, *args)
    assert spec.high is not None
    assert spec.visible is not None
    assert most <= 2 * 17


def test_a_bias_whose_gradients_are_added_before_they_are_summed_stays_whole() -> None:
    args = learned(*tensors(), torch.randn(4, 17), torch.randn(4, 17))
    assert fused_by(same_as_eager(twice_with_one_bias, *args, emitters=OURS)) == ["fused", "fused"]
