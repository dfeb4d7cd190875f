"""Recurrences whose past is a state of fixed size: pure functions of float32 arrays.

Beside the axis key of `layers`: C chunks of a row, T tokens of a chunk, S the same tokens where
they are read, X channels.
"""
