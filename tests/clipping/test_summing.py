"""One record moves a sum over millions of others by no more than its bound, after every rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.clipping.diagnostics import Diagnostics
from dpsgd_cli.clipping.run import Clipping, add_clipped_sums
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.precision import MOST_FLOAT32, MOST_ROWS, excess
from dpsgd_cli.methods.risks.losses import Logistic, Squared
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows
from dpsgd_cli.noise.run import add_noise

CPU = torch.device("cpu")
BOUND = 0.58
# to float32 rounding of the one record's own contribution
MOST = BOUND * (1 + 1e-6)


def rows_of(targets: Tensor) -> SignedRows:
    """Records of one feature, 1, whose gradient at weight 0 under the squared loss is minus the target."""
    return SignedRows(torch.ones(len(targets), 1), -targets, torch.ones(len(targets)))


def squared_sum(targets: Tensor, norm: float = BOUND) -> float:
    risk = LinearRisk(rows_of(targets), Squared())
    at, bound = torch.zeros(1, 1), torch.tensor([norm])
    risk.start(at)
    found = risk.gradient_sums_at(at, bound)
    assert torch.equal(found, risk.gradient_sums(bound))
    return float(found)


@pytest.mark.parametrize(("records", "bound"), [(500_000, 0.58), (5_000_000, 0.7)])
def test_one_record_moves_a_sum_of_millions_by_no_more_than_its_bound(records: int, bound: float) -> None:
    """It moved float32 sums by 1.024 and 1.071 times the bound."""
    same = torch.full((records + 1,), bound)
    assert abs(squared_sum(same, bound) - squared_sum(same[1:], bound)) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_record_in_front_of_all_others_moves_the_sum_by_no_more_than_its_bound(period: int) -> None:
    """All others move up, so that all roundings are new; where rows repeat they are wrong in one direction."""
    pattern = torch.rand(period, generator=torch.Generator().manual_seed(period)) * BOUND
    others = pattern.repeat(-(-3_000_000 // period))
    whole = torch.cat([torch.full((1,), BOUND), others])
    assert abs(squared_sum(whole) - squared_sum(others)) <= MOST


@pytest.mark.parametrize("merges", [False, True])
def test_equal_records_count_as_exactly_merged_or_not(merges: bool) -> None:
    def sums(records: int) -> tuple[Tensor, Tensor]:
        rows = SignedRows(torch.full((records, 1), 0.3), None, torch.full((records,), 0.3))
        risk = LinearRisk(rows.merged() if merges else rows, Logistic())
        assert len(risk.rows) == (1 if merges else records)
        at, one = torch.full((1, 1), 0.37), torch.ones(1)
        risk.start(at)
        risk.aim(torch.full((1, 1), -0.01))
        return risk.gradient_sums(one), risk.line_losses(one, 5, torch.full((1,), 0.65))

    (gradient, losses), (more, higher) = sums(500_000), sums(500_001)
    t = 0.3 * 0.37
    slope = 0.3 * float(torch.sigmoid(torch.tensor(-t, dtype=torch.float64)))
    assert float(gradient - more) == pytest.approx(slope, rel=1e-5)
    own = torch.nn.functional.softplus(-t - 0.003 * torch.arange(5, dtype=torch.float64)).clamp(max=0.65)
    torch.testing.assert_close((higher - losses)[0], own, rtol=1e-5, atol=0)


@pytest.mark.parametrize("period", [2, 3])
def test_one_record_moves_the_losses_along_a_line_by_no_more_than_its_bound(period: int) -> None:
    pattern = torch.rand(period, generator=torch.Generator().manual_seed(period)) * 2 - 1

    def losses(z: Tensor) -> Tensor:
        risk = LinearRisk(SignedRows(z.unsqueeze(1), None, z.abs()), Logistic())
        risk.start(torch.ones(1, 1))
        risk.aim(torch.full((1, 1), 0.1))
        return risk.line_losses(torch.ones(1), 3, torch.ones(1))

    others = pattern.repeat(1_000_000 // period)
    moved = losses(torch.cat([torch.full((1,), -5.0), others])) - losses(others)
    assert float((moved - 1).abs().max()) <= 1e-6, "the record in front reaches the bound of 1"


def scaled() -> nn.Module:
    """One weight; the sum of outputs as a loss has a gradient that is the input."""
    return nn.Linear(1, 1, bias=False)


def network_sum(inputs: Tensor) -> float:
    pack = Pack(scaled, [0], Placement(CPU))
    pack.expect(len(inputs))
    for part in inputs.split(MOST_ROWS):
        batch = (part.view(1, -1, 1), torch.zeros(1, len(part)), None)
        add_clipped_sums(
            pack, batch, lambda y, _: y.flatten(2).sum(2), Clipping(torch.full((1, 1), BOUND)), Diagnostics(1, CPU)
        )
    add_noise(pack.sums, torch.zeros(1, 1), torch.ones(1, 1), None)
    return float(pack.sums)


def test_one_record_moves_a_networks_sum_in_pieces_by_no_more_than_its_bound() -> None:
    same = torch.full((500_001,), 2.0)
    assert abs(network_sum(same) - network_sum(same[1:])) <= MOST
    others = torch.tensor([0.1, 0.63, 0.29]).repeat(600_000)
    assert abs(network_sum(torch.cat([torch.ones(1), others])) - network_sum(others)) <= MOST


def test_large_steps_are_products_in_float64() -> None:
    pack = Pack(scaled, [0], Placement(CPU))
    found = []
    for records in (MOST_FLOAT32, MOST_FLOAT32 + 1):
        pack.expect(records)
        with pack.in_products() as precision:
            found.append(precision)
        assert pack.session.exact == torch.float32, "norms are of what was recorded"
    assert found == [torch.float32, torch.float64]


def test_more_rows_at_once_than_the_proof_counts_are_refused() -> None:
    pack = Pack(scaled, [0], Placement(CPU))
    batch = (torch.zeros(1, MOST_ROWS + 1, 1), torch.zeros(1, MOST_ROWS + 1), None)
    with pytest.raises(ValueError, match="16385 rows in one piece"):
        add_clipped_sums(pack, batch, lambda y, _: y.flatten(2).sum(2), None, Diagnostics(1, CPU))


def test_noise_is_not_added_to_rounded_sums() -> None:
    with pytest.raises(ValueError, match=r"float64 sums, not torch\.float32"):
        add_noise(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), None)


def test_the_excess_is_the_textbooks() -> None:
    """Two neighbours, n roundings of relative size 2^-53 each in the worst order, for each of N numbers."""
    assert excess(1000) == pytest.approx(2 * 1000 * 1003 * 2.0**-53)
    assert excess(1_000_000, 1000) == pytest.approx(2 * 1_000_000 * 2002 * 2.0**-53)
