"""A schedule of a user's own: Yu et al.'s time decay from 10 with k = 0.05."""


def noise_multiplier(epoch: int) -> float:
    """sigma_t = sigma_0 / (1 + k t)."""
    return 10 / (1 + 0.05 * epoch)
