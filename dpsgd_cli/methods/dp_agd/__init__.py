"""DP-AGD (Lee and Kifer 2018)."""
