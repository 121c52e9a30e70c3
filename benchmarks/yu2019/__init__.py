"""The reproduction of Yu et al. 2019: `python -m benchmarks.yu2019.reproduce`."""
