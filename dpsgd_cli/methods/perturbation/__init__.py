"""Objective and output perturbation of convex problems."""
