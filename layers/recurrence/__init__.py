"""Attention to what a query chooses of the past."""
