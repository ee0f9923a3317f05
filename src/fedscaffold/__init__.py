"""Federated optimisation that does not drift."""
