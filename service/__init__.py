"""The HTTP service, which encodes and classifies texts and explains its results.

`inference` tokenises texts, forms batches and runs the model. `api` has the HTTP routes. `debug`
has the gradient routes, whose jobs run in a child process. `app` assembles the application. Only
the child process imports torch.
"""
