"""The choice between forms; on a GPU, where one trial of each decides, see `test_gpu.py`."""

from __future__ import annotations

import pytest
import torch

from dpsgd_cli.core.layers.forms import Chooser


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((1, 10, 10), "gram"), ((5, 10, 10), "gram"), ((6, 10, 10), "instantiated"), ((1000, 3, 64), "instantiated")],
)
def test_operations_decide_on_a_cpu(shape: tuple[int, int, int], wanted: str) -> None:
    """T^2 (I + O) against T I O: at I = O = 10 both are 500 for T = 5."""
    assert Chooser().pick(shape, torch.empty(0), (lambda: "gram", lambda: "instantiated")) == wanted


def test_only_the_chosen_form_is_computed() -> None:
    def never() -> str:
        raise AssertionError("the dearer form was computed")

    assert Chooser().pick((1, 10, 10), torch.empty(0), (lambda: "gram", never)) == "gram"
