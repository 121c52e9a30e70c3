"""Training engine (torch): models of many trials, clipped sums, noise, sampling. No accounting, no command line."""

import os

# Without this, torch uses a CPU's tiles (AMX) for bfloat16 products if the CPU reports any. Some virtual machines
# report tiles without their size, and there the first such product crashes the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
