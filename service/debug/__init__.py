"""Gradients over HTTP: why a vector is what it is. The work runs in a process of its own."""
