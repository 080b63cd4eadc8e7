"""What computes: the host, a GPU, and what they have in common."""
