"""From a job's Python to a step graph, and what that graph takes for granted."""
