"""Diagnostics against the singular value decomposition."""

import pytest
import torch

from lightning_fp4.diagnostics import attribute_outliers, mean_alignment, mean_share


def _biased(tokens, features, size):
    torch.manual_seed(tokens)
    return torch.randn(tokens, features) + size * torch.randn(features)


@pytest.mark.parametrize(("tokens", "features"), [(50, 12), (12, 50), (1, 8), (20, 20)])
@pytest.mark.parametrize("size", [0.0, 0.5, 5.0])
def test_alignment_is_that_of_the_svd(tokens, features, size):
    x = _biased(tokens, features, size)
    _, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    mean = x.double().mean(0)
    expected = (mean @ right[0]).abs() / mean.norm()
    torch.testing.assert_close(mean_alignment(x).double(), expected, rtol=1e-3, atol=1e-4)


def test_share_is_the_energy_that_centring_takes_out():
    x = _biased(64, 16, 2.0)
    singular = torch.linalg.svdvals(x)
    rest = torch.linalg.svdvals(x - x.mean(0))
    expected = 1 - rest.square().sum() / singular.square().sum()
    torch.testing.assert_close(mean_share(x), expected)
    torch.testing.assert_close(mean_share(x.view(8, 8, 16)), mean_share(x))


def test_extremes():
    row = torch.randn(16)
    equal = row.expand(10, 16)
    torch.testing.assert_close(mean_share(equal), torch.tensor(1.0))
    torch.testing.assert_close(mean_alignment(equal), torch.tensor(1.0))
    centred = torch.randn(64, 16)
    centred -= centred.mean(0)
    assert mean_share(centred) < 1e-6
    for empty in (torch.zeros(4, 16), torch.zeros(0, 16)):
        assert mean_share(empty) == 0
        assert mean_alignment(empty) == 0
    assert mean_share(centred.bfloat16()).dtype is torch.float32


def test_outliers_of_the_mean():
    """A mean that the first singular vector is, too: take the rank-one part away and the outliers are gone."""
    torch.manual_seed(0)
    x = 0.1 * torch.randn(256, 256)
    x[:, 100] += 10
    found = attribute_outliers(x)
    assert found.mean > 0.95
    assert found.channels == 1
    assert found.count == 32
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    rank_one = s[0] * torch.outer(u[:, 0], v[0])
    assert (x - rank_one).abs().max() < found.threshold


def test_outliers_of_a_channel_without_a_mean():
    torch.manual_seed(0)
    x = 0.1 * torch.randn(256, 256)
    x[:, 100] += 10 * torch.tensor([1.0, -1.0]).repeat(128)
    found = attribute_outliers(x)
    assert found.mean < 0.05
    assert found.channels == 1


def test_outliers_from_everywhere():
    torch.manual_seed(0)
    found = attribute_outliers(torch.randn(512, 256), fraction=0.05)
    assert found.mean < 0.1
    assert found.channels < 0.25
    assert 1.5 < found.threshold < 2.5


def test_what_has_no_outliers():
    assert attribute_outliers(torch.zeros(3, 4)).mean == 0
    with pytest.raises(ValueError, match="at least one token"):
        attribute_outliers(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="fraction=0"):
        attribute_outliers(torch.ones(2, 4), fraction=0)
