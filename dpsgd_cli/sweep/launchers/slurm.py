"""Slurm launcher: packs are jobs, through submitit, requeued on preemption and at the time limit, then resumed.

Nodes must see the sweep's folder, the recipes and the data under the same paths. `squeue` tells which jobs Slurm still
knows: many clusters keep no accounts, without which submitit waits for lost jobs for ever.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from dpsgd_cli.errors import RunError
from dpsgd_cli.sweep.running import Outcome, PackJob, run_job
from dpsgd_cli.sweep.schema import Resources

_SECONDS_BETWEEN_LOOKS = 1.0
# On a network file system a result may appear some time after its job has ended.
_LOOKS_BEFORE_LOST = 20


class ResumableJob:
    """A job as submitit pickles and calls it. On preemption it requests the same call again, which resumes."""

    def __call__(self, job: PackJob) -> Outcome:
        return run_job(job)

    def checkpoint(self, job: PackJob) -> Any:
        return submitit.helpers.DelayedSubmission(self, job)


def launch(jobs: Sequence[PackJob], resources: Resources) -> Iterator[Outcome]:
    """Submit every job and yield outcomes as they finish. Raises RunError at the end, naming the lost jobs."""
    if not jobs:
        return
    try:
        executor = submitit.SlurmExecutor(folder=jobs[0].out / ".slurm", max_num_timeout=1000)
        executor.update_parameters(**_options(resources))
        running = {one.job_id: one for one in executor.map_array(ResumableJob(), list(jobs))}
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        raise RunError(f"Slurm takes no jobs here: {error}") from error
    absent = dict.fromkeys(running, 0)
    lost: list[str] = []
    while running:
        queued = _queued()
        for name, one in list(running.items()):
            absent[name] = 0 if name in queued else absent[name] + 1
            if not one.paths.result_pickle.exists() and absent[name] < _LOOKS_BEFORE_LOST:
                continue
            del running[name]
            outcome = _outcome(one, lost)
            if outcome is not None:
                yield outcome
        if running:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if lost:
        raise RunError("\n".join([*lost, "the same command runs their cells again"]))


def _options(resources: Resources) -> dict[str, Any]:
    options: dict[str, Any] = {
        "job_name": "dpsgd",
        "cpus_per_task": resources.cpus,
        "mem": f"{round(resources.memory_gb * 1024)}MB",
        "time": resources.minutes,
        "array_parallelism": resources.at_once,
        "signal_delay_s": 30,
    }
    options |= {"gpus_per_node": resources.gpus} if resources.gpus else {}
    return options | ({"partition": resources.partition} if resources.partition is not None else {})


def _queued() -> set[str]:
    """Return the ids of this user's jobs that are queued or running."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(
            f"squeue failed: {done.stderr.strip()}; the jobs go on, and the same command finds their results"
        )
    return set(done.stdout.split())


def _outcome(job: Any, lost: list[str]) -> Outcome | None:
    if not job.paths.result_pickle.exists():
        lost.append(f"Slurm job {job.job_id} ended without a result; its log is {job.paths.stderr}")
        return None
    try:
        found: Outcome = job.result()
    except (FailedJobError, UncompletedJobError) as error:
        told = [line for line in str(error).splitlines() if line.strip(" -")]
        lost.append(
            f"Slurm job {job.job_id} failed ({told[-3] if len(told) > 3 else told[-1]}); see {job.paths.stderr}"
        )
        return None
    return found
