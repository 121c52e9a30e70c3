"""Attacks on a recipe's privacy claim: with canaries in the training data, and on each part of the mechanism."""
