"""Yardsticks: the majority class, and the optimum without privacy."""
