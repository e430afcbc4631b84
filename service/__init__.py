"""The service: text over HTTP to vectors and explanations, without importing torch.

`inference` tokenises, batches and runs the model. `api` serves it over HTTP. `debug` serves
gradient results. `app` assembles the application.
"""
