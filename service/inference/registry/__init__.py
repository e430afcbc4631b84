"""The served models by name: their versions, leases, replacements and changes on disk."""
