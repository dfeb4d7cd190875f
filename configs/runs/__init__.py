"""Whole runs: which model, run how. Each file's docstring is its command."""
