"""Smaller models made of larger ones: what matters least is removed, whole."""
