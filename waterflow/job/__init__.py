"""What a user trains: jobs, their batches and optimizers, and what a plain training step is."""
