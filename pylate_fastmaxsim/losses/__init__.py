"""Losses that neither host has, and the encoding for a loss of one's own."""
