"""The gradient process. It imports torch, so the serving process imports nothing from here."""
