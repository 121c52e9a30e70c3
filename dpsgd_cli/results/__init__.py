"""Results of runs: records, files and text. Plots and comparisons read these files."""
