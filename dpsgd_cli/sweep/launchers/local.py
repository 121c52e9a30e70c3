"""Local launcher: packs run one after the other in this process, because the trials of a pack fill the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsgd_cli.sweep.running import Outcome, PackJob, run_job
from dpsgd_cli.sweep.schema import Resources


def launch(jobs: Sequence[PackJob], resources: Resources) -> Iterator[Outcome]:
    """Run every job and yield the outcomes. An error that `run_job` raises stops all of them."""
    del resources
    for job in jobs:
        yield run_job(job)
