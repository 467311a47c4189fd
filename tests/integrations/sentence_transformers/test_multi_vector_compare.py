"""The complete script of docs/sentence_transformers.md, compared as it is printed."""

import pytest

from tests.support.compared_script import compared
from tests.support.examples import training_example


@pytest.mark.e2e
def test_the_script_of_a_multi_vector_encoder_compares_as_printed(encoder, tmp_path):
    text = training_example("multi-vector-script", "answerdotai/ModernBERT-base", encoder("modernbert"), "cpu")
    found = compared(tmp_path, text, "--steps", "12")
    stock, fast = found["runs"]["stock"], found["runs"]["fast"]
    assert (stock["steps"], fast["steps"]) == (12, 12) and 0 < stock["padding"] < 0.5
    assert found["summary"]["largest_loss_difference"] < 0.1 and found["summary"]["turns"]["pairs"] == 3
