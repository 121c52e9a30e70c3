"""Private selection among schedules (Yu et al. 2019, IV-A3)."""
