"""What compression costs and gives: tasks, forced tokens, recipes, figures and plots behind `bench/compression.py`."""
