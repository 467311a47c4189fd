from collections.abc import Callable
from functools import partial

import pytest


@pytest.fixture
def recipe(encoder, teacher, tmp_path) -> Callable:
    """``recipe(*overrides)``: mining in ``tmp_path`` with a model and a teacher that nobody has trained."""
    from tests.support.mining_recipe import recipe_for

    return partial(recipe_for, tmp_path, encoder("modernbert"), teacher)
