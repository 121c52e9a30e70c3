"""Calibration of predicted numbers: a private regression of targets on predictions, after the last step."""
