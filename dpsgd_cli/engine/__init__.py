"""The training engine (torch): packed models, clipped sums, noise, sampling. No accountant, no Click."""

import os

# Without this, torch makes bfloat16 products of a CPU's tiles (AMX) where the CPU announces any. Some virtual machines
# announce tiles and do not say how large they are, and there the first such product kills the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
