"""``fastmaxsim evaluate``: rankings, metrics and paired tests of trained models on one collection."""
