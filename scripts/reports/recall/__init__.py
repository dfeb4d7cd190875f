"""Associative recall: sequences that ask for what they said, and how well it is answered."""
