"""Step graphs, and passes over them. The only part of the partitioner that knows torch."""
