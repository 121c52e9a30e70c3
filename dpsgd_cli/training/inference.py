"""Trained models: written by training, loaded from a result, and applied to other records.

`model.safetensors` and `recipe.yaml` suffice. The first holds the layout of a record, the classes, the preprocessing
(with the releases of private steps, by trial), buffers and frozen parameters. Further files are needed if the recipe
names them: the Python file of a model of the user's own and its `model.weights.file` (the bundle holds their SHA-256),
the weights of `data.features`, and the user's own card. Files of methods and schedules are not needed.

Predictions and metrics of other records use the released weights alone, so they cost the training records no privacy.
The other records are not protected: metrics on them have no noise.

`data/new_rows.py` reads records, `evaluation.py` computes metrics, `library.py` has the Python interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn

from dpsgd_cli.batching.memory import rows_that_fit
from dpsgd_cli.calibration.price import LABEL as CORRECTION
from dpsgd_cli.common import interrupts
from dpsgd_cli.common.plugins import IN_MEMORY
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.common.text_format import count, quoted, shortened
from dpsgd_cli.data.dataset import Layout, Part
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.memory import is_there
from dpsgd_cli.data.new_rows import Records, Source, source_of
from dpsgd_cli.data.own_arrays import next_tokens, tokens_in
from dpsgd_cli.data.preparation import held_out_of, pipeline_of, steps_of
from dpsgd_cli.data.preprocess import Pipeline
from dpsgd_cli.data.settings import SEVERAL, Data
from dpsgd_cli.data.table import predicted
from dpsgd_cli.engine import bundle, models
from dpsgd_cli.engine.bundle import Bundle
from dpsgd_cli.engine.dropout import Still
from dpsgd_cli.engine.independence import stand_in_rows
from dpsgd_cli.engine.metrics import places_counted, surprise
from dpsgd_cli.engine.precision import MOST_ROWS
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.settings import ConvexModel, HuggingFaceModel, OwnModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.engine.weights import held, seeded
from dpsgd_cli.errors import DataError, RunError, UsageError
from dpsgd_cli.intervals.price import LABEL as RELEASED
from dpsgd_cli.preconditioning.maps import MAP, Preconditioner
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe, plain
from dpsgd_cli.results import provenance as origin
from dpsgd_cli.results import reading, store
from dpsgd_cli.training.build_models import (
    in_numbers,
    loss_of,
    make_pack,
    outputs_of,
    own_folds,
    placement,
    refuse_unknown_tokens,
)
from dpsgd_cli.training.evaluation import Columns, Models, measure, measure_once, reading_of
from dpsgd_cli.training.start import Trials

FORMAT = 3
_AT_ONCE = 4096
_MOST_NUMBERS = 1 << 24
"""Most outputs at once where a record has some for each of its places: 64 MiB in float32."""
# keys of arrays of a bundle that only `explain.py` and `intervals.py` use (`Method.after_training`)
OF_METHOD = (MAP, RELEASED, CORRECTION)


def bundle_of(trials: Trials, span: slice) -> Bundle:
    """Return the models of the trials in `span`, with all else that predictions by them need."""
    pack, dataset, recipe = trials.context.pack, trials.dataset, trials.recipe
    assert dataset.layout is not None
    weights = [
        {name: values[at:][: shape.numel()].view(shape).cpu().clone() for name, (at, shape) in pack.spans.items()}
        for values in trials.method.output
    ]
    about = {
        "format": FORMAT,
        "architecture": plain(recipe.model),
        "input_shape": trials.context.table.input_shape,
        "classes": dataset.classes,
        "layout": dataset.layout.plain(),
        "preprocess": plain(steps_of(recipe.data, trials.context.base)),
        "records": len(trials.context.table),  # the public number of places
        "made_from": origin.model_sha256(trials.members[0].loaded),
    }
    pack.require_untrained_kept()
    loaded = models.loaded_names(recipe.model, trials.context.base)
    if isinstance(recipe.model, HuggingFaceModel):
        loaded = list(pack.untrained)  # of the folder, or computed from its configuration
    untrained = {name: value.cpu() for name, value in pack.untrained.items() if name not in loaded}
    kept, cuts = dataset.released | dataset.fitted, trials.method.cuts
    for key, made in trials.method.after_training().items():
        kept |= {f"{trial}/{key}": own for trial, own in enumerate(made)}
    return Bundle(weights, about, kept, dataset.unreleased, cuts, untrained).of_trials(span)


class _About(BaseModel):
    """Metadata in a model's file."""

    model_config = ConfigDict(strict=True)
    format: int
    input_shape: list[PositiveInt]
    classes: list[str | int | float | bool] | None
    layout: dict[str, Any]
    preprocess: list[dict[str, Any]]
    made_from: dict[str, str]


@contextlib.contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Turn errors of a model's file that does not fit its recipe, or is damaged, into DataError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if interrupts.reason(error) is not None:
            raise
        told = shortened(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
        told = f"does not fit its recipe, or was damaged ({told})"
        raise DataError(f"{path}: {told}; restore it, or train again") from error


@dataclass(frozen=True)
class Trained:
    """The models of one result, one for each trial. `classes` is None for regression.

    `document`: the content of `result.json`; None if model and recipe were published without it.
    """

    loaded: LoadedRecipe
    bundle: Bundle
    layout: Layout
    classes: tuple[Any, ...] | None
    input_shape: tuple[int, ...]
    directory: Path
    document: dict[str, Any] | None = None

    @classmethod
    def load(cls, directory: Path) -> Trained:
        """Load the models of a result directory after checking that their files are unchanged.

        Raises DataError if there are none, and RunError if a file that they were made from has changed.
        """
        path = directory / bundle.NAME
        if not (directory / "recipe.yaml").is_file():
            raise DataError(f"{directory}: not a result directory (it has no recipe.yaml)")
        if not path.is_file():
            raise DataError(
                f"{directory}: holds no {bundle.NAME}, so nothing can be predicted; `dpsgd train` writes it, sweeps and"
                " comparisons only with save_model: true"
            )
        document = store.read_document(directory) if store.is_complete(directory) else None
        for name in (bundle.NAME, "recipe.yaml") if document is not None else ():
            reading.checked(directory, document or {}, name)
        found = bundle.read(path)
        if found.about.get("format") != FORMAT:
            raise DataError(f"{path}: was not written by this version of dpsgd; train again")
        with _fitting(path):
            about = _About.model_validate(found.about)
            layout = Layout.from_plain(about.layout)
        loaded = load_recipe(str(directory / "recipe.yaml"))
        classes = None if about.classes is None else tuple(about.classes)
        made = cls(loaded, found, layout, classes, tuple(about.input_shape), directory, document)
        made._check_model()
        if document is not None:
            made._check_made_from(document["provenance"])
        return made

    def _check_model(self) -> None:
        """Check that the files of the model's code and weights exist, and are those of the training."""
        for name, known in self.bundle.about["made_from"].items():
            path = self.loaded.base / name
            if not is_there(path):
                how = f"and {path} does not exist; restore it"
                if IN_MEMORY in name:
                    how = "so give it again, as to train: dpsgd.load(folder, model=..., weights=...)"
                raise DataError(f"{self.directory}: the model is made of {name}, {how}")
            if sha256(path) != known:
                raise self._changed([name])

    def _changed(self, names: list[str]) -> RunError:
        return RunError(
            f"{self.directory}: was trained with another content of {' and '.join(names)}; restore it, or train again"
        )

    def _check_made_from(self, provenance: dict[str, Any]) -> None:
        """Check that the card and the weights of features, which prediction needs, are those of the training."""
        here = {f: h for step in self.pipeline(0).steps for f, h in step.made_from.items()}
        here |= origin.card_sha256(self.loaded)
        kinds = ("data_sha256", "nonprivate_data_sha256")
        known = {name: found for kind in kinds for name, found in provenance.get(kind, {}).items()}
        changed = [name for name, found in here.items() if known.get(name) != found]
        if changed:
            raise self._changed(changed)

    @property
    def trials(self) -> int:
        return len(self.bundle.weights)

    @property
    def by_place(self) -> bool:
        """Return True if the model answers at each place of a record: a class, or the next token."""
        return self.data.task in ("token-classification", "next-token")

    @cached_property
    def data(self) -> Data:
        """Return the `data:` section by which records are read, with the preprocessing of the training."""
        steps = {"preprocess": self.bundle.about["preprocess"]}
        with _fitting(self.directory / bundle.NAME):
            return self.loaded.recipe.data.changed(**steps)

    def pipeline(self, trial: int | None = None) -> Pipeline:
        """Return the preprocessing of one trial, or of all."""
        if trial not in self._pipelines:
            chosen = self.bundle if trial is None else self.bundle.of_trials(slice(trial, trial + 1))
            steps = {key: held for key, held in chosen.kept.items() if key.rpartition("/")[2] not in OF_METHOD}
            self._pipelines[trial] = pipeline_of(self.data, self.loaded.base, self.layout, steps | chosen.unreleased)
        return self._pipelines[trial]

    @cached_property
    def _pipelines(self) -> dict[int | None, Pipeline]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot be pickled and is made again."""
        return {name: held for name, held in vars(self).items() if name != "_pipelines"}

    @property
    def source(self) -> Source:
        """Return the source of new records in the layout of the training records."""
        return source_of(self.data, self.layout, self.loaded.base)

    def remarks(self, rows: np.ndarray) -> list[str]:
        """Return remarks about `rows` (N, ...): a line per column that has values outside its public bounds."""
        by_bounds = any(
            step.bin is not None or (step.scale is not None and step.scale.by == "bounds")
            for step in steps_of(self.data, self.loaded.base)
        )
        done = "clamped to the nearer bound" if by_bounds else "used as they are"
        told = []
        for index, column in enumerate(self.layout.columns or ()):
            if column.bounds is not None:
                low, high = column.bounds
                outside = int(((rows[:, index] < low) | (rows[:, index] > high)).sum())
                found = f"{count(outside, 'value')} of {quoted(column.name)} outside of its bounds {low:g} to {high:g}"
                told += [f"{found}: {done}, as in training"] if outside else []
        return told

    def inputs(self, rows: np.ndarray, trial: int, exactly: bool = False) -> np.ndarray:
        """Return the inputs of the model of `trial` for `rows` (N, ...): (N, *input_shape), float32 or `exactly`."""
        self.check_trial(trial)
        with _fitting(self.directory / bundle.NAME), np.errstate(**SILENT):
            (x,), per_trial = self.pipeline(trial).run([rows], 1)
            own = np.asarray(x)[0] if per_trial else np.asarray(x)
            if own.shape[1:] != self.input_shape:
                raise ValueError(f"records become {own.shape[1:]}, but the model takes {self.input_shape}")
            if not self.bundle.cuts:
                return own
            dtype = torch.float64 if exactly else torch.float32
            made = Preconditioner([self.bundle.cuts[trial].to(dtype)])
            factors = made.factors(torch.from_numpy(own).to(dtype), False)
            return own * factors.numpy().reshape(-1, *[1] * (own.ndim - 1))

    def check_trial(self, trial: int) -> None:
        """Raise UsageError if there is no such trial."""
        if not 0 <= trial < self.trials:
            raise UsageError(f"there is no trial {trial}: the result has {count(self.trials, 'trial')}, from 0 on")

    def module(self, trial: int) -> nn.Module:
        """Return the model of `trial` as an ordinary module, for inputs (N, *input_shape) on the CPU."""
        self.check_trial(trial)
        outputs = outputs_of(self.loaded.recipe, "the result", None if self.classes is None else len(self.classes))
        recipe = self.loaded.recipe
        build = models.builder(recipe.model, self.input_shape, outputs, self.loaded.base, recipe.data.inputs)
        weights = self.bundle.weights[trial]
        with _fitting(self.directory / bundle.NAME):
            made = seeded(self._with_untrained(build), 0)
            missing, unexpected = made.load_state_dict(weights, strict=False)
        if unexpected or {name for name, p in made.named_parameters() if p.requires_grad} & set(missing):
            raise DataError(f"{self.loaded.source}: the model has other parameters than {bundle.NAME}; train again")
        return made.eval()

    def _with_untrained(self, build: models.Builder) -> models.Builder:
        """Return a builder of the same modules, with the precision, buffers and frozen parameters of the training."""

        def built() -> nn.Module:
            made = build().to(next(iter(self.bundle.weights[0].values())).dtype)
            own = held(made)
            if not self.bundle.untrained.keys() <= own.keys():
                raise DataError(f"{self.loaded.source}: the model has other buffers than {bundle.NAME}; train again")
            with torch.no_grad():
                for name, value in self.bundle.untrained.items():
                    own[name].copy_(value)
            return made

        return built

    def outputs(self, rows: np.ndarray, trial: int, exactly: bool = False) -> np.ndarray:
        """Return the outputs (N, K) of the model of `trial`. Raise RunError if its training diverged.

        With `exactly` they are computed in float64, so that a record's does not depend on the records beside it.
        """
        return np.concatenate(list(self._in_parts(rows, trial, exactly)))

    def _in_parts(self, rows: np.ndarray, trial: int, exactly: bool = False) -> Iterator[np.ndarray]:
        """Yield the outputs (n, ...) of rows (N, ...) in their order, some rows at a time.

        A part of outputs by place has at most `_MOST_NUMBERS` numbers, or one row.
        """
        module = self.module(trial)
        if not all(bool(torch.isfinite(value).all()) for value in self.bundle.weights[trial].values()):
            raise RunError(f"the training of trial {trial} diverged: its weights are not finite; choose another trial")
        dtype = torch.float64 if exactly else next(module.parameters()).dtype
        module.to(dtype)
        with (
            torch.inference_mode(),
            Still() if isinstance(self.loaded.recipe.model, OwnModel) else contextlib.nullcontext(),
        ):
            refuse_unknown_tokens(self.loaded, rows)
            most = _AT_ONCE // 64 if isinstance(self.loaded.recipe.model, HuggingFaceModel) else _AT_ONCE
            start = 0
            at_once = 1 if self.by_place else most  # how large the outputs of a row are is known after the first
            while start < len(rows):
                own = in_numbers(self.loaded.recipe, self.inputs(rows[start : start + at_once], trial, exactly))
                x = torch.from_numpy(own)
                y = module(x if x.dtype == torch.int64 else x.to(dtype))
                y = getattr(y, "logits", y)
                yield y.numpy()
                start += at_once
                at_once = min(most, max(1, _MOST_NUMBERS // y[0].numel())) if self.by_place else most

    def predict(self, rows: np.ndarray, trial: int) -> np.ndarray:
        """Return the predicted class or target of each row, (N,), or those of its places."""
        return np.concatenate([self.decided(own) for own in self._in_parts(rows, trial)])

    def predict_tokens(self, rows: np.ndarray, trial: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest next token at each place (N, L), and the perplexity of each row's own tokens (N,).

        Memory does not grow with rows times tokens. The perplexity of a row without a next token is NaN.
        """
        following = next_tokens(tokens_in(self.data, rows, "the records"))
        told, surprises, start = [], [], 0
        for own in self._in_parts(rows, trial):
            labels = torch.from_numpy(following[start : start + len(own)])[None]
            outputs = torch.from_numpy(own)[None]
            told.append(self.decided(own))
            surprises.append((surprise(outputs, labels) / places_counted(labels))[0].exp().numpy())
            start += len(own)
        return np.concatenate(told), np.concatenate(surprises)

    def decided(self, outputs: np.ndarray) -> np.ndarray:
        """Return the predictions of outputs (N, K): classes as the recipe writes them, or targets in their own unit."""
        if self.data.task in SEVERAL:
            return self._decided_by_place(outputs)
        if self.classes is None:
            return predicted(self.data, outputs[:, 0].astype(np.float64))
        return np.array([*self.classes, None], dtype=object)[self.chosen(outputs)]

    def _decided_by_place(self, outputs: np.ndarray) -> np.ndarray:
        """Return an array of predictions (N, ...): classes by place, 0 or 1 by label, or numbers of tokens by place."""
        if self.data.task == "multi-label":
            return (outputs > 0).astype(np.int64)
        told = outputs.argmax(axis=-1)
        return told if self.classes is None else np.array(self.classes, dtype=object)[told]

    def chosen(self, outputs: np.ndarray) -> np.ndarray:
        """Return the index of the predicted class for outputs (N, K), (N,)."""
        assert self.classes is not None
        return reading_of(self.loaded.recipe, len(self.classes)).chosen(outputs)

    def probabilities(self, outputs: np.ndarray) -> np.ndarray:
        """Return probabilities (N, classes) of outputs (N, K). Raise UsageError if the model's loss gives none."""
        if self.data.task in SEVERAL:
            raise UsageError(f"--probabilities: are of one class a record, and data.task is {self.data.task}")
        if self.classes is None:
            raise UsageError("--probabilities: a regression predicts targets, and has no classes")
        model, reading = self.loaded.recipe.model, reading_of(self.loaded.recipe, len(self.classes))
        if reading.clipped is None:
            assert isinstance(model, ConvexModel)
            raise UsageError(
                f"--probabilities: outputs of a model with loss {model.loss} are margins and no probabilities; train"
                " with loss: logistic"
            )
        return reading.probabilities(outputs)

    def evaluate(self, part: Part, folds: Tensor | None = None) -> tuple[Columns, Columns]:
        """Return the task's metrics, by trial, on labelled records, as training measures them but without noise.

        The second result holds those of the best constant answers to these records, as far as they are defined.

        With `folds`, bool (N, R), each trial is measured on the records for which its column is true.
        """
        place = placement(self.loaded.recipe, Team())
        outputs = outputs_of(self.loaded.recipe, "the result", None if self.classes is None else len(self.classes))
        pack = make_pack(self.loaded, self.input_shape, outputs, [0] * self.trials, place, self._with_untrained)
        with _fitting(self.directory / bundle.NAME), np.errstate(**SILENT):
            for trial, weights in enumerate(self.bundle.weights):
                for name, (at, shape) in pack.spans.items():
                    pack.values[trial, at : at + shape.numel()] = weights[name].reshape(shape).reshape(-1)
            (x,), per_trial = self.pipeline().run([part.x], self.trials)
            if np.asarray(x).shape[1 + per_trial :] != self.input_shape:
                raise ValueError("records do not become what the model takes")
        own = in_numbers(self.loaded.recipe, np.asarray(x))
        table = Table.load(own, np.array(part.y), per_trial, place.device, place.dtype)
        if self.bundle.cuts:
            made = Preconditioner([cut.to(table.x) for cut in self.bundle.cuts])
            table = replace(table, factors=made.factors(table.x, per_trial))
        table = table if folds is None else table.with_folds(~folds)
        rows = stand_in_rows(self.input_shape, table.x)
        most = min(self.loaded.recipe.runtime.micro_batch or rows_that_fit(pack, rows), MOST_ROWS)
        models = Models(pack, pack.values, [self.loaded.recipe] * self.trials, self.classes, most)
        once, constants = measure_once(models, table)
        return measure(models, table, loss_of(self.loaded.recipe, self.loaded.base, raw=True)) | once, constants

    def metrics(self, labelled: Records | None = None) -> dict[str, list[float]]:
        """Return the task's metrics, by trial, on labelled records or the recipe's own test records (`measured`)."""
        return self.measured(labelled)[0]

    def measured(self, labelled: Records | None = None) -> tuple[Columns, Columns]:
        """Return metrics on labelled records, and those of constant answers; by default on the recipe's test records.

        Raises RunError if the files of the test records have changed, and UsageError if these are private.
        """
        if labelled is not None:
            return self.evaluate(self.source.labelled(labelled, self.classes))
        if self.loaded.recipe.data.measured_privately:
            raise UsageError(
                "the held-out records of this result are private, and a metric without noise would reveal them; give a"
                " file of labelled records, or read the result's own metrics with their intervals (dpsgd report)"
            )
        if self.document is not None:
            origin.check_unchanged(self.document, self.loaded, self.directory)
        recipe = self.loaded.recipe
        part = held_out_of(recipe.data, self.loaded.base, recipe.folds is not None)
        return self.evaluate(part, None if recipe.folds is None else own_folds([recipe], part.known_keys))
