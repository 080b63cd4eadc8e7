"""How batches come: from the user's loader, by way of threads, to the device."""
