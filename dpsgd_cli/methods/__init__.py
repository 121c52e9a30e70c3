"""Training methods, a folder each: settings, price and run. `settings.py` lists them."""
