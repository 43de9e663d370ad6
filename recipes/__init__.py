"""Recipes outside the package: how shipped weights were made."""
