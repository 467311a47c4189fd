"""Retrieval quality and gradients of training runs."""
