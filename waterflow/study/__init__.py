"""Answers without training: what fits, with which batches, and how fast."""
