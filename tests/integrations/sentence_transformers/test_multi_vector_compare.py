"""The script of docs/sentence_transformers.md, compared as it is printed."""

import pytest

from tests.support.compared_script import compared
from tests.support.examples import script_of


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_script_of_a_multi_vector_encoder_compares_as_printed(tmp_path):
    text = script_of("multi_vector_encoder", {"bf16=torch.cuda.is_available()": "bf16=True, use_cpu=True"})
    found = compared(tmp_path, text, "--steps", "12")
    stock, fast = found["runs"]["stock"], found["runs"]["fast"]
    assert (stock["steps"], fast["steps"]) == (12, 12) and 0.5 < stock["padding"] < 0.8
    assert found["summary"]["largest_loss_difference"] < 0.1 and found["summary"]["turns"]["pairs"] == 3
