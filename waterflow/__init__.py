"""Co-train several PyTorch jobs in one process under one memory budget."""
