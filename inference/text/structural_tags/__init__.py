"""Structural tags: texts whose parts obey grammars of their own, as xgrammar and vLLM have them."""
