"""Histograms of oriented gradients of pictures whose edges are known."""

from __future__ import annotations

import torch

from dpsgd_cli.data.hog import hog


def test_an_edge_votes_for_its_direction_in_all_four_cells_of_a_block() -> None:
    """Along x rises the image: direction 0. Along y: the middle of the half turn."""
    ramp = torch.linspace(0, 1, 8)
    across, down = ramp.expand(1, 1, 8, 8), ramp[:, None].expand(1, 1, 8, 8)
    for image, bin_ in ((across, 0), (down, 2)):
        (found,) = hog(image.clone(), 4, 4)
        votes = found.reshape(4, 4)
        assert votes.argmax(dim=1).tolist() == [bin_] * 4
        assert torch.isclose(votes.square().sum(), torch.tensor(1.0), atol=0.01)
        assert torch.isclose(votes.sum(), votes[:, bin_].sum())


def test_a_flat_image_has_no_edges_and_blocks_overlap() -> None:
    found = hog(torch.full((2, 3, 16, 16), 0.5), 4, 9)
    assert found.shape == (2, 36, 3, 3)
    assert (found == 0).all()
