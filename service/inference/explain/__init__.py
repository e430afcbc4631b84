"""Explanations of scores: exact terms, and deletion of parts of a text."""
