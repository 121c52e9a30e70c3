"""Packs as jobs of a Slurm cluster, through submitit: requeued on preemption and at the time limit, then resumed.

Nodes must see the sweep's folder, the recipes and the data under the same paths. Not here: what a job does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from dpsgd_cli.errors import RunError
from dpsgd_cli.sweep.running import Job, Outcome, run_job
from dpsgd_cli.sweep.schema import Resources

_SECONDS_BETWEEN_LOOKS = 1.0


class ResumableJob:
    """What submitit pickles and calls; on preemption it asks for the same call again, which finds the checkpoint."""

    def __call__(self, job: Job) -> Outcome:
        return run_job(job)

    def checkpoint(self, job: Job) -> Any:
        return submitit.helpers.DelayedSubmission(self, job)


def launch(jobs: Sequence[Job], resources: Resources) -> Iterator[Outcome]:
    """Submit every job and give outcomes as they finish. RunError at the end names the jobs that were lost."""
    if not jobs:
        return
    executor = submitit.SlurmExecutor(folder=jobs[0].out / ".slurm", max_num_timeout=1000)
    options: dict[str, Any] = {
        "job_name": "dpsgd",
        "cpus_per_task": resources.cpus,
        "mem": f"{round(resources.memory_gb * 1024)}MB",
        "time": resources.minutes,
        "array_parallelism": resources.at_once,
        "signal_delay_s": 30,
    }
    options |= {"gpus_per_node": resources.gpus} if resources.gpus else {}
    options |= {"partition": resources.partition} if resources.partition is not None else {}
    executor.update_parameters(**options)
    running = executor.map_array(ResumableJob(), list(jobs))
    lost = []
    while running:
        finished = [one for one in running if one.done()]
        for one in finished:
            try:
                yield one.result()
            except (FailedJobError, UncompletedJobError) as error:
                lost.append(f"Slurm job {one.job_id} ({one.state}): {str(error).strip().splitlines()[-1]}")
        running = [one for one in running if one not in finished]
        if running and not finished:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if lost:
        raise RunError("\n".join([*lost, "the same command runs their cells again"]))
