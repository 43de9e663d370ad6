"""Mutated files and requests, thrown at what reads them."""
