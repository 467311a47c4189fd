"""The vector of each token of a vocabulary is that of a text of this token alone."""

from __future__ import annotations

import pytest
import torch

from pylate_fastmaxsim.integrations.pylate.static import token_vectors
from tests.support import models


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("is_query", [True, False])
def test_they_are_those_of_a_text_of_one_token(family, is_query, encoder):
    model = models.load_model(encoder(family), do_query_expansion=False)
    found = token_vectors(model, is_query, batch_size=100)
    assert model.training and found.shape == (len(model.tokenizer), 16)
    for word in "abs":
        (token,) = model.tokenizer(word, add_special_tokens=False)["input_ids"]
        ids = model.tokenize([word], is_query=is_query)["input_ids"][0].tolist()
        encoded = model.encode([word], is_query=is_query, convert_to_tensor=True)[0]
        torch.testing.assert_close(found[token], encoded[ids.index(token)], atol=1e-5, rtol=0)
