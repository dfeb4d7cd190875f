"""Architectures whose layers correct states by the delta rule, and one in a few attends."""
