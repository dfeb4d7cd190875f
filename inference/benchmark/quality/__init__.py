"""How well a model does: the perplexity of a text, and needles that it finds in one."""
