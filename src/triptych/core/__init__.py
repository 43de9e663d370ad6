"""Facts: frozen, torch-free, known to everyone."""
