"""What a run leaves behind: records, files, text. Plots and comparisons read these files."""
