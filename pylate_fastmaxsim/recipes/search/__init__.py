"""``fastmaxsim search``: encode, index and search a collection."""
