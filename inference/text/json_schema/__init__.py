"""JSON schemas (draft 2020-12) in the words that the compiler of grammars obeys exactly."""
