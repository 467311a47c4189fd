"""Indexes of PLAID as corpora."""
