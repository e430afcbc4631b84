"""Gradient routes: explanations of the served vectors, computed in a separate process."""
