"""Words of a guarantee, the same in terminal, report, comparison page, sweep report and `dpsgd account`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpsgd_cli.common.rounding import epsilon_text

NO_PRIVACY = "nothing protects the training data"
CHOSEN = "it may choose what to release by what it released, so its budget is the bound, and what a run spent is not"
EXPERIMENT = "an experiment: who knows the seed can take the noise away"


def book_words(charged: Mapping[str, Any]) -> str:
    """Return which book a result was charged to (`privacy.book`), by hashes that tell nothing of the table."""
    return f"budget book {charged['book'][:16]}, entry {charged['charge'][:16]}"


def epsilon_words(privacy: Mapping[str, Any]) -> str:
    """Return epsilon and delta of a result's `privacy` section as text. An estimate is said to be no proof."""
    if privacy["epsilon"] is None:
        return f"not finite at delta {privacy['delta']:g}"
    epsilon = f"{epsilon_text(privacy['epsilon'])} at delta {privacy['delta']:g}"
    return f"at most {epsilon}" if privacy["bound"] == "upper" else f"about {epsilon} (an estimate, no proof)"
