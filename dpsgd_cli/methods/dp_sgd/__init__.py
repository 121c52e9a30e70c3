"""DP-SGD: settings, price and run."""
