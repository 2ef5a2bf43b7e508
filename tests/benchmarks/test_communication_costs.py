"""The costs of a step on several processes: by hand at small size, and as counted in real processes."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import communication_costs as costs
from torch_locoprop.paper.gram import Structure

ROOT = Path(__file__).parents[2]
# One block of width 4 with keys of 2 and an MLP of 8: seven matrices with 144 weights.
TINY = costs.Transformer("tiny", 1, 4, 8, 2, 10)


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TOKENS", 100)


def test_weights_of_a_tiny_transformer() -> None:
    assert TINY.matrices == [(4, 4), (2, 4), (2, 4), (4, 4), (8, 4), (8, 4), (4, 8)]
    assert TINY.parameters == 16 + 8 + 8 + 16 + 32 + 32 + 32 + 2 * 40


@pytest.mark.parametrize(
    ("model", "billions"), list(zip(costs.MODELS, (1.24, 6.74, 68.98), strict=True))
)
def test_weights_of_known_models(model: costs.Transformer, billions: float) -> None:
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.005)


def test_rings() -> None:
    assert costs.gathered(100, 4, 4) == costs.Cost(300)  # three of four parts come from others
    assert costs.gathered(100, 4, 1) == costs.Cost(0)


def test_backprop_and_adamw() -> None:
    found = costs.backprop(TINY, 2)
    assert found == costs.Cost(0.5 * (2 * 2 + 4) * 224, 6 * 224 * 100 / 2)
    assert costs.adamw(TINY, 2) == costs.Cost(0, 15 * 224 / 2)


def test_muon_by_hand() -> None:
    # A polar factor of [4, 4] takes 5 (4·64 + 2·64) = 1920, of [2, 4] 5 (4·16 + 2·8) = 400, and of
    # [4, 8] 5 (4·128 + 2·64) = 3200. With seven processes each has one, the busiest one of [4, 8].
    assert costs.polar_operations(4, 4) == 1920
    assert costs.polar_operations(2, 4) == costs.polar_operations(4, 2) == 400
    assert costs.muon(TINY, 7).flop == costs.polar_operations(8, 4) == 3200
    assert costs.muon(TINY, 7).received == pytest.approx(2 * (6 / 7 * 32 + 112 / 7))
    # Two processes: 3200 + 3200, and 3200 + 1920 + 1920 + 400 or so: largest first, to the idler.
    assert costs.muon(TINY, 2).flop == max(2 * 3200 + 400 + 400, 3200 + 1920 + 1920)


def test_shampoo_by_hand() -> None:
    model = costs.Transformer("one", 1, 4, 4, 4, 0)  # seven matrices [4, 4], in blocks of 3 and 1
    blocks = [(3, 3), (3, 1), (1, 3), (1, 1)]
    factors = sum(2 * a * a * b + 2 * a * b * b for a, b in blocks)
    roots = sum(11 * (a**3 + b**3) for a, b in blocks)
    found = costs.shampoo(model, 2, block=3, every=10)
    assert found.flop == pytest.approx(7 * (2 * factors + roots / 10) / 2)
    assert found.received == pytest.approx(2 * 0.5 * 4 * 7 * 16 / 2)


@pytest.mark.parametrize(
    ("structure", "squares", "cubes", "products"),
    [
        # With Xᵀ1, and a flag, as large as a number, whether the solution is finite.
        ("full", 6 * 16 + 64, 6 * 64 + 512, 16 * 4 + 8 * 4 + 8 * 4 + 16 * 4 + 2 * 32 * 4 + 32 * 8),
        ("block", 6 * 8 + 16, 6 * 16 + 32, 144 * 2),
        ("diagonal", 6 * 4 + 8, 6 * 4 + 8, 144),
    ],
)
def test_locoprop_s_by_hand(structure: str, squares: int, cubes: int, products: int) -> None:
    own = Structure(structure, 2, ones=False)
    numbers: dict[str, Any] = {"structure": own, "every": 5}
    exact = costs.closed_form(TINY, 2, **numbers)
    more = 7 + (6 * 4 + 8 if structure == "full" else 0)
    assert exact.received == pytest.approx(4 * (squares + more) / 5)
    assert exact.flop == pytest.approx((2 * 50 * squares + cubes) / 5 + 2 * products / 2)
    iterated = costs.locoprop_s(TINY, 2, local_steps=4, **numbers)
    assert iterated.received == exact.received
    assert iterated.flop == pytest.approx(2 * 50 * squares / 5 + 3 * 2 * products / 2)


def test_locoprop_m_by_hand() -> None:
    few = costs.locoprop_m(TINY, 2, local_steps=4, rows=6)
    many = costs.locoprop_m(TINY, 2, local_steps=4, rows=100)
    flags = 7 * 4
    assert few == costs.Cost(0.5 * 4 * 6 * (6 * 4 + 8) + flags, 3 * 4 * 6 * 144 / 2)
    # Four gathers and three reduce-scatters of 144 weights, of which half come from the other process.
    assert many == costs.Cost(0.5 * 4 * 7 * 144 + flags, 3 * 4 * 100 * 144 / 2)


def test_the_spectral_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Largest first, to the idler of two processes: 3200 + 3200 + 400 + 400, and 3200 + 1920 + 1920.
    exact = costs.closed_form(TINY, 2, every=5)
    found = costs.spectral(TINY, 2, every=5)
    sums = 4 * (6 * 16 + 64 + 6 * 4 + 8)  # bytes of XᵀX and Xᵀ1
    norms_and_flags = 7 * 4 * (7 + 1)  # numbers of the agreement, the growth, zeros and rows
    there, back = 32 + 32 + 8 + 8, 144 / 2
    assert found.received == pytest.approx(sums / 5 + 0.5 * 4 * (there + back) + norms_and_flags)
    assert found.flop == pytest.approx(exact.flop + 2 * 3200 + 2 * 400)
    monkeypatch.setattr(costs, "WIDEST", 4)  # the one matrix with eight inputs is served without C
    without = costs.spectral(TINY, 2, every=5)
    in_blocks = costs.spectral(TINY, 2, every=5, structure=Structure("block", 4, ones=False))
    fewer = (64 + 8) - 32  # of the eight inputs, of which two blocks of four are kept
    assert in_blocks.received == pytest.approx(found.received - 4 * fewer / 5)
    assert without.received == pytest.approx(found.received - 4 * 72 / 5)
    of_wide = (2 * 50 * 64 + 512) / 5 + 2 * 4 / 2 * 64
    assert without.flop == pytest.approx(found.flop - of_wide)


def test_the_page_has_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    page = (ROOT / "docs" / "communication.md").read_text()
    assert "\n".join(costs.tables()).strip() in page
