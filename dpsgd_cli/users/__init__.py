"""Protection of all rows of a user together: settings and clipping of mean gradients."""
