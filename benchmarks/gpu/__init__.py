"""Benchmarks that need a GPU; `check.sh` runs them all. `--device cpu --tiny` tries their logic."""
