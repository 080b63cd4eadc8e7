"""Ways in which Python may change a step, each beside the plain loop."""
