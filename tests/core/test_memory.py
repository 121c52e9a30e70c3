from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FREED = """
import sys
import numpy as np
from dpsgd_cli.core.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
pages = []
for _ in range(20):
    block = np.empty(1 << 22)
    block[:] = 1.0
    pages.append(block.__array_interface__["data"][0])
    del block
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    block = np.empty(1 << 22)
    block[:] = 1.0
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_memory_that_a_step_frees_is_not_fetched_anew() -> None:
    faults = {}
    for way in ("keep", "return"):
        command = [sys.executable, "-c", _FREED, way]
        faults[way] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults["keep"] < faults["return"] / 10
