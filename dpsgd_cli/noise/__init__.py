"""Noise: settings, correlated noise and its price, and draws on a public grid."""
