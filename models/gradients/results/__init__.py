"""Results of the gradient methods. This package does not import torch.

The methods return these dataclasses, and the gradient process sends them as JSON. The service
derives its response models from them, so a field or property added here appears in the API and in
its documentation. In JSON, non-finite numbers are null.
"""
