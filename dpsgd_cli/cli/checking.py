"""Output of `dpsgd recipe check-model`. Reports of layers are in `engine/packing.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dpsgd_cli import data
from dpsgd_cli.common import interrupts
from dpsgd_cli.common.text_format import count
from dpsgd_cli.engine import models
from dpsgd_cli.engine.independence import stand_in_rows
from dpsgd_cli.engine.packing import Placement, elements_by_layer, layer_reports
from dpsgd_cli.engine.weights import seeded
from dpsgd_cli.errors import ModelError
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.training.build_models import check_without_data, make_pack, outputs_of, weights_told


def told(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield one line per layer, then the memory that a step needs per record and trial.

    Raises ModelError with all reasons if a layer is refused.
    """
    outline = data.outline(loaded.recipe.data, loaded.base)
    recipe, shape = loaded.recipe, outline.input_shape
    if shape is None:
        raise ModelError(f"{loaded.source}: the shape of one input is not known")
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        outputs = outputs_of(recipe, outline.name, outline.outputs if outline.outputs > 1 else None)
        module = seeded(models.builder(recipe.model, shape, outputs, loaded.base), 0)
        found = layer_reports(module)
        yield f"{recipe.name}: inputs {tuple(shape)}, {count(outputs, 'output')}"
        for verdict in found:
            how = verdict.clipped if verdict.refused is None else "REFUSED, see below"
            size = count(verdict.parameters, "parameter")
            yield f"  {verdict.name or '(the model)'}: {verdict.kind}, {size}: {how}"
        yield from weights_told(loaded)
        refused = [verdict.refused for verdict in found if verdict.refused is not None]
        if refused:
            raise ModelError("\n".join(refused))
        check_without_data(loaded, outline)
        pack = make_pack(loaded, shape, outputs, [0], Placement(torch.device("cpu")))
        held = elements_by_layer(pack, stand_in_rows(shape, torch.empty(0)))
    most = max(held, key=lambda name: held[name])
    yield f"  nothing is refused; a step holds about {sum(held.values()):,} numbers a record and trial"
    yield f"  most of them, {held[most]:,}, for {most or 'the model'}"
