"""Training methods, a file each; DP-SGD and PATE a folder. `settings.py` lists them."""
