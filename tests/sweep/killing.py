"""Runs `dpsgd sweep` again and again in processes that are killed at random moments; used by `test_kills.py`.

    python killing.py KILLS SEED FOLDER ARGUMENT...

The parent only imports and forks, so that a run costs no interpreter start and torch's threads are never forked. The
sweep is run once to FOLDER/undisturbed, which takes T seconds. Then it is run to FOLDER/round-0, killed after a random
part of T and run again, until it ends by itself; then to FOLDER/round-1, and so on, until there were KILLS kills. T is
the shortest time that a round has taken so far. After each run a JSON line says where it ran, how it ended, and the
identity of every file that can be seen.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path


def main(kills: int, source: random.Random, folder: Path, arguments: list[str]) -> None:
    import dpsgd_cli.cli.sweep
    import dpsgd_cli.sweep.session

    del dpsgd_cli
    begun = time.monotonic()
    run(arguments, folder / "undisturbed", math.inf)
    whole = time.monotonic() - begun
    number, spent = 0, 0.0
    while kills:
        begun = time.monotonic()
        end = run(arguments, folder / f"round-{number}", source.uniform(0, whole))
        spent += time.monotonic() - begun
        if end == "killed":
            kills -= 1
        else:
            # a machine that was busy before may be quick now, and no moment late enough would ever come
            number, whole, spent = number + 1, min(whole, spent), 0.0
    run(arguments, folder / f"round-{number}", math.inf)


def run(arguments: list[str], out: Path, seconds: float) -> str:
    """One sweep in a process of its own, killed after so many seconds; returns how it ended."""
    from dpsgd_cli.main import main as dpsgd

    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        dpsgd([*arguments, "--out", str(out)])
        os._exit(0)
    end = wait(child, seconds)
    print(json.dumps({"folder": out.name, "end": end, "seen": seen(out)}), flush=True)
    return end


def wait(child: int, seconds: float) -> str:
    """Kill a process after so many seconds, unless it ends before."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return f"exit {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed"


def seen(out: Path) -> dict[str, list[int]]:
    """Every visible file below `out`, by path: inode, size, and time of the last change."""
    files = [path for path in out.rglob("*") if path.is_file() and not path.relative_to(out).parts[0].startswith(".")]
    return {
        str(path.relative_to(out)): [path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns] for path in files
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), random.Random(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
