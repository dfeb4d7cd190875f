"""Layers with states of fixed size."""
