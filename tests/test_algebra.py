"""Axes, terms and their values."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from torch.fx import Graph

from sdpa_rewrite.algebra.axes import Atom, Irregular, Refine, Window, quotient, regroup, same_size
from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term, Terms, subterms, summands
from sdpa_rewrite.algebra.tiny import Inconsistent, TinySizes, TinyWorld, agree

N = sympy.Symbol("n", integer=True, positive=True)


def atoms(*sizes: int) -> list[Atom]:
    return [Atom(f"a{k}", n) for k, n in enumerate(sizes)]


def test_regroup_groups_and_ungroups() -> None:
    a, b, c = atoms(2, 3, 4)
    assert regroup([a, b, c], [6, 4]) == ((a, b), (c,))
    assert regroup([a, b, c], [2, 1, 12]) == ((a,), (), (b, c))


def test_regroup_asks_for_a_split_where_an_axis_straddles() -> None:
    (a,) = atoms(12)
    with pytest.raises(Refine) as caught:
        regroup([a], [3, 4])
    assert (caught.value.atom, caught.value.outer, caught.value.inner) == (a, 3, 4)


@pytest.mark.parametrize(("sizes", "wanted"), [((2, 3), [3, 2]), ((6,), [4, 2]), ((2,), [2, 2]), ((2, 2), [2])])
def test_regroup_refuses_what_has_no_grouping(sizes: tuple[int, ...], wanted: list[int]) -> None:
    with pytest.raises(Irregular):
        regroup(atoms(*sizes), wanted)


def test_a_window_is_not_split() -> None:
    (base,) = atoms(12)
    with pytest.raises(Irregular):
        regroup([Window("w", 12, base=base, offset=0)], [3, 4])


def test_symbolic_sizes() -> None:
    assert quotient(N * 4, 4) == N
    assert quotient(N * 4, N) == 4
    assert quotient(N + 1, 2) is None
    assert same_size(N * (N + 1), N * N + N)
    assert not same_size(N, N + 1)
    assert regroup([Atom("a", N), Atom("b", 4)], [4 * N])[0][1].size == 4


@pytest.fixture
def terms() -> Terms:
    return Terms()


def leaf(terms: Terms, *axes: Atom, name: str = "x", dtype: torch.dtype = torch.float32) -> Term:
    node = Graph().placeholder(name)
    node.meta["val"] = torch.empty([int(a.size) for a in axes], dtype=dtype)
    return terms.leaf(node, tuple((a,) for a in axes))


def test_equal_terms_are_one_object(terms: Terms) -> None:
    x, y = leaf(terms, *atoms(2)), leaf(terms, *atoms(2))
    assert terms.call("add", x, y) is terms.call("add", y, x)
    assert terms.call("sub", x, y) is not terms.call("sub", y, x)
    assert terms.number(1) is not terms.number(1.0)


def test_numbers_fold(terms: Terms) -> None:
    x = leaf(terms, *atoms(2))
    assert terms.call("div", terms.call("mul", x, terms.number(6.0)), terms.number(2.0)).args[1].attr == 3.0
    assert terms.call("mul", x, terms.number(1.0)) is x
    assert terms.call("add", x, terms.number(0)) is x
    assert terms.call("sqrt", terms.number(N)).attr == sympy.sqrt(N)
    assert terms.call("div", terms.number(1.0), terms.number(0)).op == "div", "no fold that would raise"


def test_where_of_a_known_condition(terms: Terms) -> None:
    x, y = leaf(terms, *atoms(2)), leaf(terms, *atoms(2))
    assert terms.call("where", terms.number(True), x, y) is x
    assert terms.call("where", terms.number(False), x, y) is y
    assert terms.call("where", leaf(terms, dtype=torch.bool), x, x) is x


def test_concatenations_are_pulled_out_and_summed_apart(terms: Terms) -> None:
    a, b, ab = Atom("a", 2), Atom("b", 3), Atom("ab", 5)
    joined = terms.cat(ab, (a, b), (leaf(terms, a), leaf(terms, b)))
    assert terms.call("exp", joined).op == "cat"
    total = terms.reduce("sum", joined, (ab,))
    assert total.op == "add"
    assert [t.attr[1] for t in total.args] == [(a,), (b,)]


def test_a_mask_is_not_taken_apart(terms: Terms) -> None:
    a = Atom("a", 2)
    mask = terms.call("add", leaf(terms, a), leaf(terms, a))
    top = terms.reduce("amax", leaf(terms, a), (a,))
    assert summands(terms, terms.call("add", mask, top)) in ([mask, top], [top, mask])


class World(TinyWorld):
    """A world of given terms."""

    def __init__(self, *tops: Term, seed: int = 0, special: bool = False, columns: tuple[Atom, ...] = ()) -> None:
        super().__init__(tops, columns, set(), seed, special)


def test_a_contraction_is_the_sum_of_a_product(terms: Terms) -> None:
    i, j, d = Atom("i", 8), Atom("j", 9), Atom("d", 4)
    x, y = leaf(terms, i, d), leaf(terms, j, d)
    product = terms.reduce("sum", terms.call("mul", x, y), (d,))
    world = World(product)
    value, a, b = evaluate(product, world), evaluate(x, world), evaluate(y, world)
    order = [world.position[t] for t in (i, j, d)]
    a, b, value = (t.permute(order) for t in (a, b, value))
    assert torch.allclose(value[..., 0], a[:, 0] @ b[0].T)


def test_a_sum_along_an_axis_that_a_value_lacks_counts_it(terms: Terms) -> None:
    i = Atom("i", 8)
    total = terms.reduce("sum", terms.call("mul", leaf(terms), leaf(terms, i)), (Atom("j", 9), i))
    world = World(total)
    assert evaluate(total, world).numel() == 1


def test_sizes_change_from_draw_to_draw() -> None:
    a, b = atoms(8, 9)
    drawn = {(s := TinySizes([a, b], [], turn)).of(8) - s.of(9) for turn in range(4)}
    assert len(drawn) > 1


def test_pieces_of_a_concatenation_add_up() -> None:
    a, b, ab = Atom("a", 2), Atom("b", 3), Atom("ab", 5)
    sizes = TinySizes([a, b, ab], [(ab, (a, b, None))])
    assert sizes.of(5) == sizes.of(2) + sizes.of(3) + 1
    with pytest.raises(Inconsistent):
        sizes.of(77)


def test_special_draws_mask_whole_rows(terms: Terms) -> None:
    i, j = Atom("i", 8), Atom("j", 9)
    mask, bias = leaf(terms, i, j, dtype=torch.bool), leaf(terms, i, j)
    world = World(mask, bias, special=True, seed=1, columns=(j,))
    rows = evaluate(mask, world).all(world.position[j])
    assert rows.any()
    assert not rows.all()
    assert evaluate(bias, world).isneginf().all(world.position[j]).any()


def test_a_forced_condition_takes_both_outcomes(terms: Terms) -> None:
    i, j = Atom("i", 8), Atom("j", 9)
    far = terms.call("lt", terms.number(1e9), terms.call("sub", terms.index((i,)), terms.index((j,))))
    world = World(far)
    assert not evaluate(far, world).any()
    world = World(far)
    world.force(far)
    assert evaluate(far, world).any()
    assert not evaluate(far, world).all()


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1.0, 1.0 + 1e-12, True),
        (1.0, 1.0 + 1e-4, False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (-math.inf, -math.inf, True),
        (-math.inf, math.inf, False),
        (-math.inf, -3.4e38, False),
    ],
)
def test_agreement(a: float, b: float, equal: bool) -> None:
    assert (agree(torch.tensor([a, 1.0]).double(), torch.tensor([b, 1.0]).double()) is None) is equal


def test_subterms_come_once(terms: Terms) -> None:
    x = leaf(terms, *atoms(2))
    term = terms.call("mul", terms.call("exp", x), terms.call("exp", x))
    assert [t.op for t in subterms(term)] == ["mul", "exp", "leaf"]
