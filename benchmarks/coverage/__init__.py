"""How much of what PyTorch's users train is captured, and whether any of it differs from eager."""
