from dataclasses import asdict

from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.recipes.config.kinds import PyLateFast
from pylate_fastmaxsim.recipes.plugin import plugin_of


def test_every_option_of_the_fast_section_reaches_the_flag():
    section = PyLateFast(padding_free=False, compile=True, stock_masking=True)
    assert all(value != getattr(PyLateFast(), key) for key, value in asdict(section).items() if key != "enabled")
    with plugin_of(section):
        # Scores are pooled as loss.pooling says.
        assert {"enabled": True, **asdict(current_options())} == asdict(section) | {"pooling": {}}
