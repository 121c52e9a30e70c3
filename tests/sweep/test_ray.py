"""A sweep on a real Ray cluster of two nodes on this machine, one of which is removed in the middle.

It is a long test, and skips where Ray is not installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dpsgd_cli.main import main

pytest.importorskip("ray")
pytestmark = pytest.mark.long
SWEEP = """\
name: clustered
recipes: [quickstart]
grid: {method.learning_rate: [0.5, 1, 2, 4, 8, 16]}
list:
  - epochs: 120
    repeats: 1
    runtime.checkpoint_seconds: 0
    privacy.budget: null
    privacy.delta: 1.0e-5
    privacy.schedule: {kind: uniform, initial: 4}
most_trials: 2
resources: {cpus: 1, memory_gb: 0.3}
"""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that only coordinates and two nodes with a core each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield found
    finally:
        import ray

        ray.shutdown()
        found.shutdown()


def test_a_lost_node_loses_no_cell(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    nodes = [cluster.add_node(num_cpus=1, memory=2**30) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    file, out = tmp_path / "sweep.yaml", tmp_path / "cluster"
    file.write_text(SWEEP)
    lost: list[int] = []

    def lose_one() -> None:
        stop = time.monotonic() + 120
        while time.monotonic() < stop and len(list(out.glob(".pack-*.checkpoint"))) < 2:
            time.sleep(0.05)
        lost.append(len(list(out.glob("quickstart-*"))))
        cluster.remove_node(nodes[0], allow_graceful=False)

    thread = threading.Thread(target=lose_one)
    thread.start()
    done = CliRunner().invoke(main, ["sweep", str(file), "--launcher", "ray", "--out", str(out)])
    thread.join()
    assert done.exit_code == 0, done.output
    assert "6 of 6 trials done, 0 cells failed" in done.stderr
    assert lost and lost[0] < 6, "the node was removed too late to be in the middle"
    local = CliRunner().invoke(main, ["sweep", str(file), "--out", str(tmp_path / "local")])
    assert local.exit_code == 0, local.output
    (table,) = out.glob("*.table.csv")
    assert table.read_text() == (tmp_path / "local" / table.name).read_text()
