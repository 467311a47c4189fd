"""A ColBERT whose encoder is a table, made of another one."""

from __future__ import annotations

import pytest
import torch

from pylate_fastmaxsim.integrations.pylate.static import token_vectors
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.from_scratch import build_token_table
from pylate_fastmaxsim.recipes.models.load import load_model
from tests.support import models


@pytest.fixture(scope="module")
def source(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    model = models.load_model(encoder("bert"), document_length=24)
    model.save_pretrained(str(folder))
    return model, str(folder)


def test_it_begins_with_the_vectors_of_single_tokens(source, tmp_path):
    model, folder = source
    build_token_table(ColBERTSection(token_table=folder, query_length=20), 0, tmp_path / "table")
    table = load_model(ColBERTSection(name_or_path=str(tmp_path / "table")), "cpu", 0)
    assert (table.query_length, table.document_length) == (20, 24)
    expected = token_vectors(model)
    texts = ["", *models.sentences(12), "."]
    for is_query, length in ((True, 20), (False, 24)):
        for words, vectors in zip(texts, table.encode(texts, is_query=is_query, convert_to_tensor=True), strict=True):
            ids = model.tokenizer(words, add_special_tokens=False)["input_ids"][:length]
            torch.testing.assert_close(vectors, expected[ids], atol=1e-6, rtol=0)


def test_what_cannot_be_a_table_is_refused(source, encoder, tmp_path):
    build_token_table(ColBERTSection(token_table=source[1]), 0, tmp_path / "table")
    with pytest.raises(
        RecipeError, match=r"model.embedding_size must be 16 or null, because model.name_or_path .* ends"
    ):
        load_model(ColBERTSection(name_or_path=str(tmp_path / "table"), embedding_size=8), "cpu", 0)
    with pytest.raises(RecipeError, match="model.token_table .* cannot be loaded"):
        build_token_table(ColBERTSection(token_table=str(tmp_path)), 0, tmp_path / "other")
