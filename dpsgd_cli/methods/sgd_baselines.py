"""`sgd-ma` and `sgd-adv`: DP-SGD on Poisson batches as DP-AGD was compared with, told apart by their accountants.

What is released, and its sensitivity: `dp_sgd.py`. Noise is the least that the moments accountant (Abadi et al. 2016)
or strong composition of amplified Gaussian mechanisms (Bassily et al. 2014, with its exact constants) allows
(`privacy/gradient_plan.py`). Both are proved for Poisson batches under add-remove, and that is the sampler used: the
published baseline drew batches of fixed size and accounted for Poisson ones.
"""

from __future__ import annotations

from dpsgd_cli.methods.dp_sgd import DpSgd


class SgdMa(DpSgd):
    """Noise by the moments accountant."""


class SgdAdv(DpSgd):
    """Noise by strong composition after amplification by sampling."""
