"""What happens while steps run: lanes, tapes, random streams, tensors in the arena."""
