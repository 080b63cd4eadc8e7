"""Models to train, in plain torch, without any infrastructure."""
