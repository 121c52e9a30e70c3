"""Batches of private training: samplers, rows on disk and memory."""
