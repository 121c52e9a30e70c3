"""Releases as events of dp_accounting, to be checked by it, and histories of Opacus' accountants, to be priced here.

An event is a JSON object with `class_name` and the fields of that class in `dp_accounting.dp_event`; nested events are
objects, too. That is what `DpEvent.to_named_tuple` holds. The noise multiplier of an event is relative to the norm of
ONE record. A ledger's is relative to the sensitivity of the sum, which is the same number under add-remove and zero-out
(dp_accounting: ADD_OR_REMOVE_ONE and REPLACE_SPECIAL). Replaced records are refused.

Opacus keeps (noise multiplier, sampling rate, steps) and does not say how batches were drawn: it prices Poisson
batches, even if the loader shuffled. So the batching has to be stated. An epoch of shuffled batches, 1/rate steps long,
is charged as one unsampled Gaussian; a part of an epoch is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    GaussianSum,
    PureDP,
    Release,
    ZeroConcentrated,
    merge,
    whole_number,
)
from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.errors import DataError, PrivacyError, UnsupportedMechanism

Event = dict[str, Any]
MODULE = "dp_accounting.dp_event"
_MOST_BYTES = 64_000_000


def to_event(releases: Sequence[Release]) -> Event:
    """Return all releases as one composed event.

    Guarantee: an accountant that prices the event prices these releases. Raises UnsupportedMechanism for a release that
    no event describes.
    """
    return _event("ComposedDpEvent", events=[_composed(release) for release in merge(list(releases))])


def _event(name: str, **fields: Any) -> Event:
    return {"module_name": MODULE, "class_name": name, **fields}


def _composed(release: Release) -> Event:
    return _event("SelfComposedDpEvent", event=_one(release), count=release.count)


def _one(release: Release) -> Event:
    mechanism = release.mechanism
    if NEIGHBOURS[mechanism.adjacency].replaced:
        raise UnsupportedMechanism(f"{mechanism.adjacency}: the noise of an event is relative to one record's norm")
    if isinstance(mechanism, GaussianSum):
        noise = _event("GaussianDpEvent", noise_multiplier=mechanism.noise_multiplier)
        if not mechanism.sampled:
            return noise
        if not mechanism.comes_and_goes:
            raise UnsupportedMechanism(f"{mechanism.batching} batches have no event")
        return _event("PoissonSampledDpEvent", sampling_probability=mechanism.sampling_rate, event=noise)
    if isinstance(mechanism, ZeroConcentrated):
        return _event("ZCDpEvent", rho=mechanism.rho, xi=0.0)
    if isinstance(mechanism, PureDP) and mechanism.source == "laplace" and mechanism.epsilon > 0:
        return _event("LaplaceDpEvent", noise_multiplier=1 / mechanism.epsilon)
    delta = mechanism.delta if isinstance(mechanism, ApproximateDP) else 0.0
    return _event("EpsilonDeltaDpEvent", epsilon=mechanism.epsilon, delta=delta)


def read_opacus_history(path: Path, batching: str) -> list[Release]:
    """Return the releases of an Opacus history, under add-remove (poisson) or zero-out (shuffle).

    The file is JSON: `accountant.history`, a list of [noise multiplier, sampling rate, steps], or an object with that
    list at `history` (`accountant.state_dict()`). Raises DataError, with the place, for anything else.
    """
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: is larger than {_MOST_BYTES // 1_000_000} MB")
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON file: {type(error).__name__}") from None
    history = held.get("history") if isinstance(held, Mapping) else held
    if not isinstance(history, list):
        raise DataError(f"{path}: holds no history, a list of [noise multiplier, sampling rate, steps]")
    found = []
    for number, entry in enumerate(history):
        place = f"{path}: history[{number}]"
        try:
            noise, rate, uses = entry
            if not all(isinstance(one, int | float) and math.isfinite(one) for one in (noise, rate)):
                raise ValueError
            steps = whole_number("steps", uses)
            if batching == "poisson":
                found.append(Release(GaussianSum(float(noise), "add-remove", "poisson", float(rate)), steps))
            else:
                epochs = _whole_epochs(rate, steps, place)
                found.append(Release(GaussianSum(float(noise), "zero-out", "shuffle"), epochs))
        except (TypeError, ValueError):
            raise DataError(f"{place}: must be [noise multiplier, sampling rate, steps], three numbers") from None
        except PrivacyError as error:
            raise DataError(f"{place}: {error}") from None
    return merge(found)


def _whole_epochs(rate: float, steps: int, place: str) -> int:
    """Return the number of epochs of 1 / `rate` steps; DataError for a part of one, which may have begun again."""
    length = round(1 / rate) if rate > 0 else 0
    if not length or abs(length * rate - 1) > 1e-6:
        raise DataError(f"{place}: an epoch of shuffled batches has a whole number of steps, not one over {rate:g}")
    if steps % length:
        raise DataError(
            f"{place}: {steps} steps are no whole number of epochs of {length}: an epoch that began again would use its"
            " records twice, and a history does not tell"
        )
    return steps // length
