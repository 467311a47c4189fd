"""A synthetic study of pooling: concentration of gradients, long documents, injected tokens."""
