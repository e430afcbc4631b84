"""The terms of the sum that a similarity is."""
