"""Full-batch gradient descent (DP-GD)."""
