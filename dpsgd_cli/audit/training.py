"""Training of an audit: the recipe's trials with canaries, stopped halfway and resumed, observed step by step."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch

from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, ZeroConcentrated, merge
from dpsgd_cli.audit.claim import GRADIENT, Claim, before_gradients, gradients
from dpsgd_cli.audit.stage import Cut, Staged, stage
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.errors import PrivacyError


def train(made: Cut) -> tuple[Watch, Claim]:
    """Train all trials; return the observations and the claim in the trials' ledgers."""
    watch = Watch()
    staged = stage(made, watch)
    watch.begin(staged)
    half = staged.trials.method.epochs // 2
    _epochs(staged, half)
    if half and not staged.trials.method.finished:
        staged = _resumed(staged, made, watch)
        watch.begin(staged)
    _epochs(staged, staged.trials.method.epochs)
    return watch, claim_of(staged)


def _epochs(staged: Staged, until: int) -> None:
    trials = staged.trials
    while trials.done < until and not trials.method.finished:
        trials.method.run_epoch(trials.done)
        trials.done += 1


def _resumed(staged: Staged, made: Cut, watch: Watch) -> Staged:
    """Return the training as another process would continue it from its checkpoint."""
    content = _through_a_file(staged.trials.checkpoint(staged.trials.snapshot()))
    again = stage(made, watch, content)
    again.trials.restore(content, Path("the audit's checkpoint"))
    return again


def _through_a_file(content: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def claim_of(staged: Staged) -> Claim:
    """Return the claim: the first trial's charges if releases are planned, the budget if they are chosen.

    Raises PrivacyError if trials were charged differently.
    """
    plan, ledgers = staged.plan, staged.trials.context.ledgers
    stated = plan.guarantee()
    cap = plan.budget_cap
    if isinstance(cap, GaussianSum):
        return Claim((Release(cap),), stated.epsilon, plan.delta)
    if isinstance(cap, ZeroConcentrated):
        # the Gaussian whose zCDP is exactly rho
        one = GaussianSum(1 / math.sqrt(2 * cap.rho), cap.adjacency)
        return Claim((Release(one),), stated.epsilon, plan.delta)
    found = [_epochs_of(ledger) for ledger in ledgers]
    if any(one != found[0] for one in found):
        raise PrivacyError("trials of one recipe were charged differently; nothing can be said of all of them together")
    return Claim(found[0], stated.epsilon, plan.delta)


def law_of(staged: Staged) -> Claim:
    """Return the distribution from which thresholds are chosen, as the first trial's ledger states it.

    If releases are chosen, these are its charges for gradients, less than the claimed budget; else the claim. A ledger
    is public and does not depend on scores.
    """
    claim = claim_of(staged)
    made = [entry.release for entry in staged.trials.context.ledgers[0].entries]
    own = [one for one in made if isinstance(one.mechanism, GaussianSum) and one.mechanism.label == GRADIENT]
    return Claim(tuple(merge(own)), claim.epsilon, claim.delta) if staged.plan.chooses else claim


def _epochs_of(ledger: Ledger) -> tuple[Release, ...]:
    return (*before_gradients(ledger), *gradients(ledger).values())
