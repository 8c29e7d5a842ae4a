"""Feature coordinates: orthogonality to the mean, whitening, label independence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from private_rlhf.reward_models.basis import FeatureBasis, identity_basis, pair_basis


def _features(n: int = 200, d: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(d, d)) * np.geomspace(1, 1e-2, d)
    return tuple(rng.normal(size=(n, d)) @ mix.T + 5.0 * rng.normal(size=d) for _ in range(2))


@pytest.mark.parametrize("whiten", [True, False])
def test_mean_score_is_zero_and_scale_is_one(whiten: bool) -> None:
    phi_a, phi_b = _features()
    basis = pair_basis(phi_a, phi_b, num_components=5, whiten=whiten)
    assert basis.matrix.shape == (12, 5)
    weight = basis.weight(torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    scores = torch.from_numpy(np.concatenate([phi_a, phi_b])) @ weight
    assert abs(float(scores.mean())) < 1e-10 * float(scores.abs().max())
    moments = (basis.coordinates(torch.from_numpy(phi_a - phi_b)) ** 2).mean(0)
    if whiten:
        torch.testing.assert_close(moments, torch.ones(5, dtype=torch.float64))
    else:
        assert float(moments.mean()) == pytest.approx(1.0)
        assert float(moments[0]) > 2 * float(moments[-1])


def test_it_does_not_depend_on_which_response_is_called_a() -> None:
    """A basis that did would leak the label of data that store the preferred response first."""
    phi_a, phi_b = _features()
    swap = np.random.default_rng(1).random(len(phi_a)) < 0.5
    swapped = np.where(swap[:, None], phi_b, phi_a), np.where(swap[:, None], phi_a, phi_b)
    first, second = pair_basis(phi_a, phi_b), pair_basis(*swapped)
    projector = first.matrix @ torch.linalg.pinv(first.matrix)
    torch.testing.assert_close(projector, second.matrix @ torch.linalg.pinv(second.matrix))
    torch.testing.assert_close(first.matrix @ first.matrix.T, second.matrix @ second.matrix.T)


def test_full_rank_loses_only_the_mean_direction() -> None:
    phi_a, phi_b = _features()
    assert pair_basis(phi_a, phi_b).num_components == 11
    assert pair_basis(phi_a, phi_b, centre=False).num_components == 12
    assert torch.equal(identity_basis(3).weight(torch.arange(3.0).double()), torch.arange(3.0).double())


def test_weights_and_coordinates_agree() -> None:
    phi_a, phi_b = _features()
    basis = pair_basis(phi_a, phi_b, num_components=4)
    theta = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    features = torch.from_numpy(phi_a)
    torch.testing.assert_close(features @ basis.weight(theta), basis.coordinates(features) @ theta)
    assert isinstance(basis, FeatureBasis)


def test_errors() -> None:
    phi_a, phi_b = _features()
    with pytest.raises(ValueError, match="never differ"):
        pair_basis(phi_a, phi_a)
    with pytest.raises(ValueError, match="same, non-empty shape"):
        pair_basis(phi_a, phi_b[:-1])
    with pytest.raises(ValueError, match="phi_b must be finite"):
        pair_basis(phi_a, np.where(phi_b > 6, np.nan, phi_b))
    with pytest.raises(ValueError, match="num_components must be at least 1"):
        pair_basis(phi_a, phi_b, num_components=0)


def test_blocks_count_alike_whatever_their_units() -> None:
    generator = torch.Generator().manual_seed(0)
    phi_a, phi_b = torch.randn(2, 400, 6, generator=generator, dtype=torch.float64)
    unit = torch.tensor([1.0, 1.0, 1.0, 50.0, 50.0, 50.0], dtype=torch.float64)
    sides = ((phi_a, phi_b), (phi_a * unit, phi_b * unit))
    plain, scaled = (pair_basis(one, other, num_components=4, whiten=False, blocks=2) for one, other in sides)
    one, other = plain.coordinates(phi_a - phi_b), scaled.coordinates((phi_a - phi_b) * unit)
    # Equal up to the signs of directions.
    torch.testing.assert_close(one @ one.T, other @ other.T, rtol=0.0, atol=1e-8)
    lopsided = pair_basis(*sides[1], num_components=2, whiten=False)
    assert float(lopsided.matrix[:3].abs().max()) < 0.02 * float(lopsided.matrix[3:].abs().max())
