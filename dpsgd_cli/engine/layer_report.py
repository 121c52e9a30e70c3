"""Report for each layer of a model: the rule that clips it, or the reason why it is refused. Reads no data.

The report does not test whether the model mixes examples; `independence.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dpsgd_cli.engine.packing import rule_for
from dpsgd_cli.errors import ModelError


@dataclass(frozen=True)
class Verdict:
    """Verdict on one layer with trained parameters: its rule and method of clipping, or the reason for refusal."""

    name: str
    kind: str
    parameters: int
    rule: str | None = None
    clipped: str = ""
    refused: str | None = None


def verdicts(module: nn.Module, name: str = "") -> list[Verdict]:
    """Return the verdicts on all layers of a model, in order; every refused layer is listed, not only the first."""
    kind = type(module).__name__
    size = sum(p.numel() for p in module.parameters() if p.requires_grad and not nn.parameter.is_lazy(p))
    try:
        rule = rule_for(module, name)
    except ModelError as error:
        return [Verdict(name, kind, size, refused=str(error))]
    if rule is not None:
        return [Verdict(name, kind, size, rule.__name__, rule.clipped)]
    return [found for own, child in module.named_children() for found in verdicts(child, f"{name}.{own}".strip("."))]
