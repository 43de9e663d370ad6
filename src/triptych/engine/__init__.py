"""Stage 4. Many requests, one device."""
