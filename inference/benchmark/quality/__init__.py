"""How well a model does on a text: perplexity, and distributions next to another model's."""
