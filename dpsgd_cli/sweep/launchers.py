"""Launchers, by name. A launcher runs packs and yields their outcomes as they finish.

To add one, write a function here and add a line to `LAUNCHERS`, which the command line reads too.

On a cluster, nodes must see the sweep's folder, the recipes and the data under the same paths.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.sweep.settings import Resources

if TYPE_CHECKING:
    from dpsgd_cli.sweep.running import Outcome, PackJob

    Run: TypeAlias = Callable[[PackJob], Outcome]
    Launcher: TypeAlias = Callable[[Run, Sequence[PackJob], Resources], Iterator[Outcome]]

_SECONDS_BETWEEN_LOOKS = 1.0
# On a network file system a result may appear some time after its job has ended.
_LOOKS_BEFORE_LOST = 20
_AGAIN = "the same command runs their cells again"


def local(run: Run, jobs: Sequence[PackJob], resources: Resources) -> Iterator[Outcome]:
    """Run packs one after the other in this process: the trials of one pack fill the machine."""
    del resources
    return map(run, jobs)


def on_ray(run: Run, jobs: Sequence[PackJob], resources: Resources) -> Iterator[Outcome]:
    """Run packs as tasks of the cluster of RAY_ADDRESS, or of one that is started on this machine.

    A task whose node is lost runs again on another, from its checkpoint. Raises RunError naming the lost tasks.
    """
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    task = ray.remote(
        num_cpus=resources.cpus, num_gpus=resources.gpus, memory=int(resources.memory_gb * 2**30), max_retries=-1
    )(run)
    waiting = list(jobs)
    running = [task.remote(job) for job in waiting[: resources.at_once]]
    waiting = waiting[resources.at_once :]
    lost = []
    while running:
        finished, running = ray.wait(running, num_returns=1)
        for one in finished:
            try:
                yield ray.get(one)
            except ray.exceptions.RayError as error:
                lost.append(f"a Ray task was lost: {str(error).strip().splitlines()[-1]}")
        while waiting and len(running) < resources.at_once:
            running.append(task.remote(waiting.pop(0)))
    if lost:
        raise RunError("\n".join([*lost, _AGAIN]))


class ResumableJob:
    """A job as submitit pickles and calls it. On preemption it requests the same call again, which resumes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, job: PackJob) -> Outcome:
        return self._run(job)

    def checkpoint(self, job: PackJob) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, job)


def on_slurm(run: Run, jobs: Sequence[PackJob], resources: Resources) -> Iterator[Outcome]:
    """Run packs as Slurm jobs, requeued on preemption and at the time limit, then resumed.

    `squeue` tells which jobs Slurm still knows: many clusters keep no accounts, without which submitit waits for lost
    jobs for ever. Raises RunError at the end, naming the lost jobs.
    """
    import submitit

    if not jobs:
        return
    try:
        executor = submitit.SlurmExecutor(folder=jobs[0].out / ".slurm", max_num_timeout=1000)
        executor.update_parameters(**_slurm_options(resources))
        running = {one.job_id: one for one in executor.map_array(ResumableJob(run), list(jobs))}
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        raise RunError(f"Slurm takes no jobs here: {error}") from error
    absent = dict.fromkeys(running, 0)
    lost: list[str] = []
    while running:
        queued = _queued()
        for name, one in list(running.items()):
            absent[name] = 0 if name in queued else absent[name] + 1
            ended = one.paths.result_pickle.exists()
            if not ended and absent[name] < _LOOKS_BEFORE_LOST:
                continue
            del running[name]
            if not ended:
                lost.append(f"Slurm job {name} ended without a result; its log is {one.paths.stderr}")
                continue
            try:
                outcome: Outcome = one.result()
            except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
                told = [line for line in str(error).splitlines() if line.strip(" -")]
                why = told[-3] if len(told) > 3 else told[-1]
                lost.append(f"Slurm job {name} failed ({why}); see {one.paths.stderr}")
            else:
                yield outcome
        if running:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if lost:
        raise RunError("\n".join([*lost, _AGAIN]))


def _slurm_options(resources: Resources) -> dict[str, Any]:
    options: dict[str, Any] = {
        "job_name": "dpsgd",
        "cpus_per_task": resources.cpus,
        "mem": f"{round(resources.memory_gb * 1024)}MB",
        "time": resources.minutes,
        "array_parallelism": resources.at_once,
        "signal_delay_s": 30,
    }
    options |= {"gpus_per_node": resources.gpus} if resources.gpus else {}
    options |= {"additional_parameters": resources.slurm} if resources.slurm else {}
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


LAUNCHERS: dict[str, tuple[Launcher, str | None]] = {
    "local": (local, None),
    "slurm": (on_slurm, "submitit"),
    "ray": (on_ray, "ray"),
}
"""Each launcher, with the package that it needs beyond dpsgd's own."""


def get(name: str) -> Launcher:
    """Return the launcher called `name`. Raises UsageError if a package that it needs is not installed."""
    launch, package = LAUNCHERS[name]
    if package is not None and find_spec(package) is None:
        raise UsageError(f"--launcher {name} needs {package}: pip install 'dpsgd[{name}]'")
    return launch
