"""Deployment: Compose, Kubernetes, Ray Serve and a load test."""
