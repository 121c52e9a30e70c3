"""PATE: teachers that vote for public records."""
