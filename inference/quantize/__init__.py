"""Weights of few bits, made with what a model reads of a text: a layer at a time."""
