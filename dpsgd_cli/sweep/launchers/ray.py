"""Ray launcher: packs are tasks of a cluster; a task whose node is lost runs again on another, from its checkpoint.

Nodes must see the sweep's folder, the recipes and the data under the same paths. The launcher connects to the cluster
of RAY_ADDRESS, or starts one on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ray

from dpsgd_cli.errors import RunError
from dpsgd_cli.sweep.running import Outcome, PackJob, run_job
from dpsgd_cli.sweep.schema import Resources


def launch(jobs: Sequence[PackJob], resources: Resources) -> Iterator[Outcome]:
    """Run every job on the cluster and yield outcomes as they finish. Raises RunError naming the lost tasks."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    task = ray.remote(
        num_cpus=resources.cpus, num_gpus=resources.gpus, memory=int(resources.memory_gb * 2**30), max_retries=-1
    )(run_job)
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
        raise RunError("\n".join([*lost, "the same command runs their cells again"]))
