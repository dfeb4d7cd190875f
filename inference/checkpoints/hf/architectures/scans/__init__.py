"""Mixers alone: Mamba and Mamba-2."""
