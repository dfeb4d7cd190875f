"""Tasks that a model is tested by: documents of a file, and what the engine makes of them."""
