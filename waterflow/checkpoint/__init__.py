"""Checkpoints: a job between two steps as tensors and JSON, on disk, and back."""
