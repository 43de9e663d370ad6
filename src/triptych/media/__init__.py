"""Turn bytes into tokens and features."""
