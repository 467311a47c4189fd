"""The kinds of model that recipes train, a file each. :func:`pylate_fastmaxsim.recipes.models.load.kind_of` finds them."""
