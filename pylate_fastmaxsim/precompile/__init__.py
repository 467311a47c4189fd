"""Compile the kernels that batches of given sizes run, before they run."""
