"""Stage 3. Parts a device can run, proved equal to the reference."""
