"""PyLate's losses without the encoder."""
