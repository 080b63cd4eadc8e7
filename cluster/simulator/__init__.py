"""A cluster in simulated time."""
