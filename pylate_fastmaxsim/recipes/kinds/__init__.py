"""The kinds of model that recipes train, a file each. :func:`pylate_fastmaxsim.recipes.kind.kind_of` finds them."""
