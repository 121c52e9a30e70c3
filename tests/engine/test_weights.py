"""What a model holds was drawn from the seed, is a constant, or is declared."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpsgd_cli.engine import weights
from dpsgd_cli.engine.settings import Weights
from dpsgd_cli.errors import DataError, ModelError

PRETRAINED = torch.arange(18.0).view(3, 6)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)


def holding(make: Callable[[], Any], buffer: bool = False, trained: bool = True) -> Callable[[], nn.Module]:
    """Builds a model whose `table` is what `make` gives: a parameter, a buffer, or a plain attribute."""

    def build() -> nn.Module:
        made, value = Base(), make()
        if buffer:
            made.register_buffer("table", value)
        else:
            made.table = nn.Parameter(value, requires_grad=trained) if isinstance(value, Tensor) else value
        return made

    return build


def from_elsewhere() -> Tensor:
    return torch.tensor(np.random.default_rng().random(3))


SAME_IN = "table is the same for every seed in"
SAME = "table is the same for every seed and no constant"
WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "trained": (holding(PRETRAINED.clone), SAME),
    "frozen": (holding(PRETRAINED.clone, trained=False), SAME),
    "buffer": (holding(PRETRAINED.clone, buffer=True), SAME),
    "whole numbers": (holding(lambda: PRETRAINED.to(torch.int8), buffer=True), SAME),
    "one number is another": (holding(lambda: torch.tensor([1.0, 1.0, 1.001])), SAME),
    "beside new rows": (holding(lambda: torch.cat([PRETRAINED, torch.randn(2, 6)])), f"{SAME_IN} 18 of its 30 numbers"),
    "from elsewhere": (holding(from_elsewhere), "table differs between two builds of one seed"),
    "hidden": (holding(lambda: [{"a": PRETRAINED.numpy()}]), r"table\[0\]\['a'\] is a tensor or array"),
}


@pytest.mark.parametrize(("build", "message"), WRONG.values(), ids=WRONG)
def test_what_no_seed_drew_is_refused_by_its_name(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}"):
        weights.check_declared(build, None, [])


def test_what_is_declared_or_loaded_passes_and_nothing_else_does() -> None:
    build = holding(PRETRAINED.clone, buffer=True)
    weights.check_declared(build, Weights(constant=["table"], public=True), [])
    weights.check_declared(build, Weights(file="x.safetensors", public=True), ["table"])
    with pytest.raises(ModelError, match="the model has no parameter or buffer tabel; did you mean table"):
        weights.check_declared(build, Weights(constant=["tabel", "table"], public=True), [])
    with pytest.raises(ModelError, match="differs between two builds"):  # no declaration helps
        weights.check_declared(holding(from_elsewhere), Weights(constant=["table"], public=True), [])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("buffer", [False, True])
def test_constants_and_what_the_seed_draws_need_no_declaration(value: float, buffer: bool) -> None:
    for make in (
        lambda: torch.full((3,), value),
        lambda: torch.tensor(value),
        lambda: torch.randn(3),
        lambda: torch.cat([torch.full((3,), value), torch.randn(3)]),
        lambda: torch.randint(2, (9,)) * 2.0 - 1,
    ):
        weights.check_declared(holding(make, buffer=buffer), None, [])


def test_checking_draws_nothing_from_torch() -> None:
    before = torch.get_rng_state()
    weights.check_declared(Base, None, [])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_is_loaded_by_name_and_the_rest_stays(tmp_path: Path, suffix: str) -> None:
    file, made = tmp_path / f"w{suffix}", Base()
    (save_file if suffix == ".safetensors" else torch.save)({"last.weight": PRETRAINED}, file)
    bias = made.last.bias.detach().clone()
    weights.load(made, weights.read(file), file.name)
    assert torch.equal(made.last.weight, PRETRAINED) and torch.equal(made.last.bias, bias)
    for tensors, message in (
        ({"last.wieght": PRETRAINED}, "holds last.wieght, which the model does not have; did you mean last.weight"),
        ({"last.weight": PRETRAINED.T}, "last.weight is (6, 3) in w.pt and (3, 6) in the model"),
    ):
        with pytest.raises(ModelError, match=re.escape(message)):
            weights.load(made, tensors, "w.pt")


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.folder),))


def test_no_code_in_a_file_of_weights_is_run(tmp_path: Path) -> None:
    torch.save({"last.weight": Trap(tmp_path / "made")}, tmp_path / "trap.pt")
    torch.save([PRETRAINED], tmp_path / "list.pt")
    (tmp_path / "w.safetensors").write_bytes(b"0")
    for name in ("trap.pt", "w.safetensors", "none.pt", "list.pt"):
        with pytest.raises(DataError, match=rf"^model.weights.file: .*{name}"):
            weights.read(tmp_path / name)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("said", [{"file": "w.pt"}, {"file": "w.pt", "public": False}, {"public": True}])
def test_public_has_no_default_and_something_must_be_named(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"public|file"):
        Weights.model_validate(said)
