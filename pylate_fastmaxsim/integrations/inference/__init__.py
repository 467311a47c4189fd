"""Encode many texts outside of training: tokenised ahead, in batches of tokens, copied while the next one runs."""
