"""A sweep on a real Slurm of one node, whose jobs are preempted, killed and lost; started and stopped by the test.

It is a long test (Linux, as root, with slurm-wlm and munge), and skips where Slurm is not installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs Slurm (apt install slurm-wlm munge)"),
]
ROOT = Path(__file__).parents[2]
CONFIGURATION = """\
ClusterName=dpsgd
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={next_port}
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
SWEEP = """\
name: clustered
recipes: [quickstart]
grid: {method.learning_rate: [1, 2, 4, 8]}
list:
  - epochs: 400
    repeats: 1
    runtime.checkpoint_seconds: 0
    privacy.budget: null
    privacy.delta: 1.0e-5
    privacy.schedule: {kind: uniform, initial: 4}
most_trials: 2
resources: {cpus: 1, memory_gb: 1, minutes: 5, slurm: {comment: mine}}
"""


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Wait for something outside this process; fail when it does not come."""
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop, "it did not happen in time"
        time.sleep(0.05)


def tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A controller and a node on this machine, with a key and ports of their own."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, next_port = one.getsockname()[1], other.getsockname()[1]
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, port=port, next_port=next_port)
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}"
        for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")
    ]
    daemons = []
    try:
        daemons.append(subprocess.Popen(["munged", "--foreground", "--force", *munge]))
        until(lambda: (folder / "munge.socket").exists())
        for name in ("slurmctld", "slurmd"):
            assert shutil.which(name), f"{name} is not installed (apt install slurm-wlm)"
            daemons.append(
                subprocess.Popen(
                    [name, "-D", "-f", str(folder / "slurm.conf")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        until(
            lambda: (
                "idle"
                in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False).stdout
            )
        )
        yield folder
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=30)
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    command = [sys.executable, "-m", "dpsgd_cli", "sweep", str(tmp_path / "sweep.yaml"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, told = process.communicate(timeout=400)
    assert process.returncode == 0, out + told
    return told


def running() -> list[str]:
    return tool("squeue", "-h", "--array", "-t", "R", "-o", "%i").split()


def all_at_work(out: Path) -> list[str]:
    """The running jobs, if each has written a checkpoint: a job that only starts has nothing to lose."""
    jobs = running()
    return jobs if jobs and len(jobs) == len(list(out.glob(".pack-*.checkpoint"))) else []


def logs(out: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in (out / ".slurm").glob("*.err"))


def resumed(out: Path) -> bool:
    """Whether a job went on from a checkpoint. Slurm holds a requeued job back for two minutes; it may start now."""
    for job in tool("squeue", "-h", "--array", "-t", "PD", "-o", "%i").split():
        subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], capture_output=True, check=False)
    return "Continuing after epoch" in logs(out)


def test_preempted_jobs_are_requeued_and_go_on(slurm: Path, tmp_path: Path) -> None:
    out = tmp_path / "cluster"
    process = start(tmp_path, "--launcher", "slurm", "--out", str(out))
    until(lambda: any(out.glob(".pack-*.checkpoint")))
    assert set(tool("squeue", "-h", "--array", "-o", "%k").split()) == {"mine"}
    for job in running():
        tool("scancel", job, "--signal", "USR2")
    until(lambda: resumed(out) or process.poll() is not None)
    told = finish(process)
    assert "Continuing after epoch" in logs(out)
    assert "4 of 4 trials done, 0 cells failed" in told
    finish(start(tmp_path, "--out", str(tmp_path / "local")))
    (table,) = out.glob("*.table.csv")
    assert table.read_text() == (tmp_path / "local" / table.name).read_text()
    assert {path.name for path in out.iterdir()} - {".slurm"} == {path.name for path in (tmp_path / "local").iterdir()}


def test_a_job_that_is_lost_is_told_and_run_again_by_the_same_command(slurm: Path, tmp_path: Path) -> None:
    out = tmp_path / "cluster"
    process = start(tmp_path, "--launcher", "slurm", "--out", str(out))
    until(lambda: bool(all_at_work(out)))
    tool("scancel", "--full", "--signal", "KILL", all_at_work(out)[0])
    _, told = process.communicate(timeout=200)
    assert (process.returncode, "ended without a result; its log is" in told) == (1, True), told
    assert "Continuing after epoch" in finish(start(tmp_path, "--out", str(out)))
