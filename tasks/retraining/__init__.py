"""Retraining without Prefect and Ray: what is new, which model is better, and the registry of promoted models."""
