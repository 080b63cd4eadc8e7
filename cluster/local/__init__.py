"""One node: who gets how much of its GPUs, as a pure function that simulator and engine share."""
