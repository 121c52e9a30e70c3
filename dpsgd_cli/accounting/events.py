"""Releases as events of dp_accounting and back, and histories of Opacus' accountants: to check and to be checked.

An event is a JSON object with `class_name` and the fields of that class in `dp_accounting.dp_event`; nested events are
objects, too. That is what `DpEvent.to_named_tuple` holds. The noise multiplier of an event is relative to the norm of
ONE record. A ledger's is relative to the sensitivity of the sum, which is the same number under add-remove and zero-out
(dp_accounting: ADD_OR_REMOVE_ONE and REPLACE_SPECIAL). Replaced records are refused both ways.

What is read must mean exactly what a mechanism of the ledger means, or something weaker that is proved:

- `GaussianDpEvent` is an unsampled Gaussian; `PoissonSampledDpEvent` of one such event a Poisson-sampled one. Several
  events on one sample are refused: no theorem here prices them.
- `LaplaceDpEvent` of scale b is (1/b)-DP, and nothing more is used: our Laplace theorem is for a single number.
- `EpsilonDeltaDpEvent`, `ZCDpEvent` without xi, and `TruncatedSubsampledGaussianDpEvent` are releases of their own.
- `SelfComposedDpEvent` and `ComposedDpEvent` compose; `NoOpDpEvent` releases nothing.

Any other class, field or number is refused: an event that was skipped would be missing from the price.

Opacus keeps (noise multiplier, sampling rate, steps) and does not say how batches were drawn: it prices Poisson
batches, even if the loader shuffled. So the batching has to be stated. An epoch of shuffled batches, 1/rate steps long,
is charged as one unsampled Gaussian; a part of an epoch is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    GaussianSum,
    PureDP,
    Release,
    TruncatedSum,
    ZeroConcentrated,
    merge,
)
from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.errors import DataError, PrivacyError, UnsupportedMechanism

Event = dict[str, Any]
MODULE = "dp_accounting.dp_event"
_MOST_BYTES = 64_000_000
_MOST_USES = 2**53
_DEEPEST = 50


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
    if isinstance(mechanism, TruncatedSum):
        return _event(
            "TruncatedSubsampledGaussianDpEvent",
            dataset_size=mechanism.records,
            sampling_probability=mechanism.sampling_rate,
            truncated_batch_size=mechanism.largest_batch,
            noise_multiplier=mechanism.noise_multiplier,
        )
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


def read_events(path: Path, adjacency: Adjacency) -> list[Release]:
    """Return the releases of a file with one event, under `adjacency`. Raises DataError, with the place, for others."""
    if NEIGHBOURS[adjacency].replaced:
        raise DataError(f"{path}: events say the noise over one record's norm: give add-remove or zero-out")
    found: list[Release] = []
    _read(_json(path), adjacency, 1, found, f"{path}: ")
    return merge(found)


def _read(event: object, adjacency: Adjacency, uses: int, found: list[Release], place: str, depth: int = 0) -> None:
    """Append the releases of `event`, used `uses` times, to `found`."""
    if not isinstance(event, Mapping) or not isinstance(event.get("class_name"), str):
        raise DataError(f"{place}an event is an object with a class_name")
    name = event["class_name"]
    place = f"{place}{name}"
    if depth > _DEEPEST:
        raise DataError(f"{place}: nested more than {_DEEPEST} deep")
    if event.get("module_name", MODULE) not in (MODULE, "dp_accounting"):
        raise DataError(f"{place}: of module {quoted(event['module_name'])}, which is not {MODULE}")
    if name not in _FIELDS:
        raise DataError(f"{place}: no release of a ledger is proved to be this event; known: {', '.join(_FIELDS)}")
    given, known = set(event) - {"module_name", "class_name"}, set(_FIELDS[name])
    if given != known and given | {"xi"} != known:
        held = ", ".join(sorted(map(quoted, given))) or "no fields"
        raise DataError(f"{place}: has {held}, but must have {', '.join(_FIELDS[name]) or 'none'}")
    if name == "ComposedDpEvent":
        if not isinstance(event["events"], list):
            raise DataError(f"{place}: events must be a list")
        for number, one in enumerate(event["events"]):
            _read(one, adjacency, uses, found, f"{place}.events[{number}]: ", depth + 1)
    elif name == "SelfComposedDpEvent":
        times = uses * _whole(event, "count", place)
        if times > _MOST_USES:
            raise DataError(f"{place}: more than 2^53 uses")
        _read(event["event"], adjacency, times, found, f"{place}: ", depth + 1)
    elif name != "NoOpDpEvent":
        try:
            found.append(Release(_MECHANISMS[name](event, adjacency, place), uses))
        except PrivacyError as error:
            raise DataError(f"{place}: {error}") from None


def _number(event: Mapping[str, Any], name: str, place: str) -> float:
    value = event[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{place}: {name} is {quoted(value)}, but must be a finite number")
    return float(value)


def _whole(event: Mapping[str, Any], name: str, place: str) -> int:
    value = _number(event, name, place)
    if value != int(value) or not 0 <= value <= _MOST_USES:
        raise DataError(f"{place}: {name} is {quoted(event[name])}, but must be a whole number from 0 to 2^53")
    return int(value)


def _poisson(event: Mapping[str, Any], adjacency: Adjacency, place: str) -> GaussianSum:
    inner = event["event"]
    gaussian = isinstance(inner, Mapping) and inner.get("class_name") == "GaussianDpEvent"
    if not gaussian or set(inner) - {"module_name", "class_name"} != {"noise_multiplier"}:
        raise DataError(f"{place}: only one GaussianDpEvent on each sample has a price here")
    rate = _number(event, "sampling_probability", place)
    return GaussianSum(_number(inner, "noise_multiplier", place), adjacency, "poisson", rate)


def _truncated(event: Mapping[str, Any], adjacency: Adjacency, place: str) -> TruncatedSum:
    return TruncatedSum(
        _number(event, "noise_multiplier", place),
        adjacency,
        "truncated-poisson",
        _number(event, "sampling_probability", place),
        records=_whole(event, "dataset_size", place),
        largest_batch=_whole(event, "truncated_batch_size", place),
    )


def _laplace(event: Mapping[str, Any], adjacency: Adjacency, place: str) -> PureDP:
    scale = _number(event, "noise_multiplier", place)
    if not scale > 0:
        raise DataError(f"{place}: noise_multiplier is {scale:g}: without noise there is no privacy to price")
    return PureDP(1 / scale, adjacency)


def _zcdp(event: Mapping[str, Any], adjacency: Adjacency, place: str) -> ZeroConcentrated:
    if event.get("xi", 0.0) != 0:
        raise DataError(f"{place}: xi is not 0, for which no release has a price here")
    return ZeroConcentrated(_number(event, "rho", place), adjacency)


def _approximate(event: Mapping[str, Any], adjacency: Adjacency, place: str) -> PureDP | ApproximateDP:
    epsilon, delta = _number(event, "epsilon", place), _number(event, "delta", place)
    return ApproximateDP(epsilon, delta, adjacency) if delta else PureDP(epsilon, adjacency)


_MECHANISMS: dict[str, Callable[[Mapping[str, Any], Adjacency, str], Any]] = {
    "GaussianDpEvent": lambda event, adjacency, place: GaussianSum(
        _number(event, "noise_multiplier", place), adjacency
    ),
    "PoissonSampledDpEvent": _poisson,
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "LaplaceDpEvent": _laplace,
    "ZCDpEvent": _zcdp,
    "EpsilonDeltaDpEvent": _approximate,
}
_FIELDS: dict[str, tuple[str, ...]] = {
    "ComposedDpEvent": ("events",),
    "SelfComposedDpEvent": ("event", "count"),
    "NoOpDpEvent": (),
    "GaussianDpEvent": ("noise_multiplier",),
    "PoissonSampledDpEvent": ("sampling_probability", "event"),
    "TruncatedSubsampledGaussianDpEvent": (
        "dataset_size", "sampling_probability", "truncated_batch_size", "noise_multiplier",
    ),
    "LaplaceDpEvent": ("noise_multiplier",),
    "ZCDpEvent": ("rho", "xi"),
    "EpsilonDeltaDpEvent": ("epsilon", "delta"),
}  # fmt: skip
"""Fields of each event that is read; `xi` may be left out."""


def read_opacus_history(path: Path, batching: str) -> list[Release]:
    """Return the releases of an Opacus history, under add-remove (poisson) or zero-out (shuffle).

    The file is JSON: `accountant.history`, a list of [noise multiplier, sampling rate, steps], or an object with that
    list at `history` (`accountant.state_dict()`). Raises DataError, with the place, for anything else.
    """
    held = _json(path)
    history = held.get("history") if isinstance(held, Mapping) else held
    if not isinstance(history, list):
        raise DataError(f"{path}: holds no history, a list of [noise multiplier, sampling rate, steps]")
    found = []
    for number, entry in enumerate(history):
        place = f"{path}: history[{number}]"
        if not isinstance(entry, list) or len(entry) != 3:
            raise DataError(f"{place}: must be [noise multiplier, sampling rate, steps]")
        named = dict(zip(("noise multiplier", "sampling rate", "steps"), entry, strict=True))
        noise, rate = _number(named, "noise multiplier", place), _number(named, "sampling rate", place)
        steps = _whole(named, "steps", place)
        try:
            if batching == "poisson":
                found.append(Release(GaussianSum(noise, "add-remove", "poisson", rate), steps))
            else:
                found.append(Release(GaussianSum(noise, "zero-out", "shuffle"), _whole_epochs(rate, steps, place)))
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


def _json(path: Path) -> Any:
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: is larger than {_MOST_BYTES // 1_000_000} MB")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON file: {type(error).__name__}") from None
