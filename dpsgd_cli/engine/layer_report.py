"""Layer by layer, how a model is clipped, and what of it cannot be. Reads no data; for people, before training.

Not here: rules (`engine/layers/`), which one applies (`engine/packing.py`), whether examples stay apart
(`engine/independence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dpsgd_cli.engine.packing import rule_for
from dpsgd_cli.errors import ModelError


@dataclass(frozen=True)
class Verdict:
    """Of one layer with trained parameters: its rule and how that clips, or why it is refused."""

    name: str
    kind: str
    parameters: int
    rule: str | None = None
    clipped: str = ""
    refused: str | None = None


def verdicts(module: nn.Module, name: str = "") -> list[Verdict]:
    """What becomes of every layer of a model, in order: all that is refused by itself, not the first only."""
    kind = type(module).__name__
    size = sum(p.numel() for p in module.parameters() if p.requires_grad and not nn.parameter.is_lazy(p))
    try:
        rule = rule_for(module, name)
    except ModelError as error:
        return [Verdict(name, kind, size, refused=str(error))]
    if rule is not None:
        return [Verdict(name, kind, size, rule.__name__, rule.clipped)]
    return [found for own, child in module.named_children() for found in verdicts(child, f"{name}.{own}".strip("."))]
