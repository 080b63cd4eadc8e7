"""What a step does to memory and how long it takes: measured, or from fake tensors."""
