"""Packs one after the other in this process: the trials of a pack already fill the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsgd_cli.sweep.running import Job, Outcome, run_job
from dpsgd_cli.sweep.schema import Resources


def launch(jobs: Sequence[Job], resources: Resources) -> Iterator[Outcome]:
    """Run every job; what stops one for reasons that are not its own stops all."""
    del resources
    for job in jobs:
        yield run_job(job)
