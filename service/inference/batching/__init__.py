"""Rows of all requests wait in one queue, and run in batches on the streams of a device."""
