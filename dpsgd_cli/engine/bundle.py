"""File of trained models, `model.safetensors`: weights by trial, arrays that preprocessing keeps, and metadata.

The metadata, as JSON, describe how to use the model: architecture, shapes, classes, layout of a record, preprocessing
(`training/inference.py`). Names of arrays that depend on training rows without noise start with `nonprivate_`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dpsgd_cli.common.package_files import MODEL as NAME
from dpsgd_cli.errors import DataError

__all__ = ["NAME", "Bundle", "read"]

_ABOUT = "dpsgd"
_KEPT = "preprocess/"
_UNRELEASED = "nonprivate_preprocess/"
_CUTS = "preconditioner/"
_UNTRAINED = "untrained/"


@dataclass(frozen=True)
class Bundle:
    """Content of a model file.

    `weights`: tensors of each trial by name. `kept`: arrays of preprocessing by "step" or "trial/step". `unreleased`:
    likewise, but computed without noise. `untrained`: buffers and frozen parameters by name, equal in all trials,
    except those that `model.weights.file` loads. `cuts`: one per trial of a preconditioner (`preconditioning/maps.py`).
    """

    weights: Sequence[dict[str, Tensor]]
    about: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    unreleased: dict[str, np.ndarray] = field(default_factory=dict)
    cuts: Sequence[Tensor] = ()
    untrained: dict[str, Tensor] = field(default_factory=dict)

    def of_trials(self, span: slice) -> Bundle:
        """Return the bundle restricted to the trials in `span`, renumbered from 0."""
        kept, unreleased = _of(self.kept, span), _of(self.unreleased, span)
        return Bundle(self.weights[span], self.about, kept, unreleased, self.cuts[span], self.untrained)

    def stating(self, privacy: Mapping[str, Any] | None) -> Bundle:
        """Return the bundle with the statement that its weights were released under; None: that of another release."""
        rest = {name: value for name, value in self.about.items() if name != "privacy"}
        return replace(self, about=rest if privacy is None else rest | {"privacy": dict(privacy)})

    def to_bytes(self) -> bytes:
        """Return the content of the file. With a single trial, tensor names have no prefix `trial-0/`."""
        several = len(self.weights) > 1
        tensors = {
            f"trial-{trial}/{name}" if several else name: value.contiguous()
            for trial, own in enumerate(self.weights)
            for name, value in own.items()
        }
        for prefix, arrays in ((_KEPT, self.kept), (_UNRELEASED, self.unreleased)):
            tensors |= {f"{prefix}{key}": torch.from_numpy(np.array(held, order="C")) for key, held in arrays.items()}
        tensors |= {f"{_CUTS}{trial}": cut.cpu().contiguous() for trial, cut in enumerate(self.cuts)}
        tensors |= {f"{_UNTRAINED}{name}": value.contiguous() for name, value in self.untrained.items()}
        # one entry, since safetensors writes several in arbitrary order
        return save(tensors, {_ABOUT: json.dumps(self.about)})


def _of(arrays: dict[str, np.ndarray], span: slice) -> dict[str, np.ndarray]:
    found = {}
    for key, held in arrays.items():
        trial, _, step = key.rpartition("/")
        if not trial:
            found[key] = held
        elif span.start <= int(trial) < span.stop:
            found[f"{int(trial) - span.start}/{step}"] = held
    return found


def read(path: Path) -> Bundle:
    """Read a model file; raise DataError if it cannot be read as one."""
    weights: dict[int, dict[str, Tensor]] = {}
    kept: dict[str, np.ndarray] = {}
    unreleased: dict[str, np.ndarray] = {}
    cuts: dict[int, Tensor] = {}
    untrained: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(_ABOUT, "{}"))
            if not isinstance(about, dict):
                raise ValueError("what it says of itself is no object")
            for name in file.keys():  # noqa: SIM118, which is no dict
                tensor, (place, _, own) = file.get_tensor(name), name.partition("/")
                if f"{place}/" in (_KEPT, _UNRELEASED):
                    (kept if f"{place}/" == _KEPT else unreleased)[own] = tensor.numpy()
                elif f"{place}/" == _CUTS:
                    cuts[int(own)] = tensor
                elif f"{place}/" == _UNTRAINED:
                    untrained[own] = tensor
                else:
                    trial, own = (place, own) if name.startswith("trial-") else ("trial-0", name)
                    weights.setdefault(int(trial.removeprefix("trial-")), {})[own] = tensor
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as the file of a model: {error}") from None
    listed = [cuts[trial] for trial in sorted(cuts)]
    return Bundle([weights[trial] for trial in sorted(weights)], about, kept, unreleased, listed, untrained)
