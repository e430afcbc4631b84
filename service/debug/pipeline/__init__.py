"""The path of every gradient request: access, model, texts, job, gradient process and response."""
