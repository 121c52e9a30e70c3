"""PrivGene, a private genetic search (Zhang et al. 2013)."""
