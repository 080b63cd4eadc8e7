"""A job's steps, ready to run: captured, compiled, profiled, checked, captured anew."""
