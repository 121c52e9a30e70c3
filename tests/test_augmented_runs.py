"""Whole runs with augmented images and averaged weights: the same alone, in a pack, in pieces and after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from dpsgd_cli.errors import RecipeError, RunError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member

COMMON = [
    "model={kind: mlp, hidden: [8]}", "data.augment={copies: 2, crop: 1}",
    "method.averaging={kind: ema, decay: 0.9}", "method.batch_size=40", "data.split={test: 0.9}", "epochs=1",
    "save_model=true",
]  # fmt: skip


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def run(out: Path, *overrides: str) -> dict[str, Tensor]:
    return weights(loop.run(resolve_auto(load_recipe("quickstart", [*COMMON, *overrides])), loop.Options(out)))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(value.allclose(other[name], rtol=1e-4, atol=1e-5) for name, value in one.items())


def test_a_trial_ends_the_same_alone_and_in_a_pack_and_in_small_pieces(tmp_path: Path) -> None:
    variants = [["seed=3", "repeats=1"], ["repeats=1", "method.learning_rate=1"]]
    loaded = [load_recipe("quickstart", [*COMMON, *variant]) for variant in variants]
    pack = [Member(one, loop.plan_recipe(one)[0]) for one in map(resolve_auto, loaded)]
    together = [weights(made) for made in loop.run_pack(pack, loop.Options(tmp_path / "pack"))]
    for found, variant in zip(together, variants, strict=True):
        assert same(found, run(tmp_path / "alone", *variant))
    assert same(together[0], run(tmp_path / "pieces", *variants[0], "runtime.micro_batch=30"))
    assert not same(together[0], run(tmp_path / "other", *variants[0], "data.augment.copies=1"))


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Augmentation, the average and the weights: bit for bit."""
    loaded = load_recipe("quickstart", [*COMMON, "repeats=1", "epochs=3"])

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(RunError, match="1 of 3 epochs are kept"):
        loop.run(resolve_auto(loaded), loop.Options(tmp_path / "a", progress=stop))
    resumed = weights(loop.run(resolve_auto(loaded), loop.Options(tmp_path / "a", resume=True)))
    undisturbed = weights(loop.run(resolve_auto(loaded), loop.Options(tmp_path / "b")))
    assert all(value.equal(undisturbed[name]) for name, value in resumed.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.features={kind: scattering}"], "data.augment: data.features are made once"),
        (["method={kind: gd}", "privacy=null"], "data.augment: method gd does not augment; use dp-sgd or sgd"),
        (["model={kind: convex}"], "data.augment: the convex problem is that of the records as they are"),
    ],
)
def test_what_cannot_be_augmented_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("quickstart", [*COMMON, *overrides])
