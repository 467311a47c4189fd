"""The plugin as a recipe switches it."""

from dataclasses import asdict

from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.recipes.config.kinds import ColBERTFast
from pylate_fastmaxsim.recipes.plugin import switched


def test_every_option_of_the_fast_section_reaches_the_flag():
    section = ColBERTFast(padding_free=False, compile=True, stock_masking=True)
    assert all(value != getattr(ColBERTFast(), key) for key, value in asdict(section).items() if key != "enabled")
    with switched(section):
        # Scores are pooled as loss.pooling says.
        assert {"enabled": True, **asdict(current_options())} == asdict(section) | {"pooling": {}}
