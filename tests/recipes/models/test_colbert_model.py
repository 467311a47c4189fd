import pytest
import torch
from pylate.models import ColBERT, Dense

from pylate_fastmaxsim.integrations.pylate.static import token_vectors
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.from_scratch import build_token_table
from pylate_fastmaxsim.recipes.models.load import load_model, load_retriever
from tests.support.models import sentences
from tests.support.saved_models import LATE


def test_two_projections_of_a_trained_model_are_its_own(encoder, tmp_path):
    trained = ColBERT(encoder("modernbert"), embedding_size=8, device="cpu")
    trained.append(Dense(8, 4))
    trained.save(str(tmp_path))
    model = load_model(ColBERTSection(name_or_path=str(tmp_path), embedding_size=4), "cpu", seed=0)
    assert torch.equal(model[-1].linear.weight, trained[-1].linear.weight)


def test_a_table_begins_with_the_vectors_of_single_tokens(saved, tmp_path):
    model = load_retriever(saved(LATE), "cpu")
    build_token_table(ColBERTSection(token_table=saved(LATE), query_length=20), 0, tmp_path)
    table = load_model(ColBERTSection(name_or_path=str(tmp_path)), "cpu", 0)
    assert (table.query_length, table.document_length) == (20, model.document_length)
    expected = token_vectors(model)
    texts = ["", *sentences(12), "."]
    for is_query, length in ((True, 20), (False, model.document_length)):
        for words, vectors in zip(texts, table.encode(texts, is_query=is_query, convert_to_tensor=True), strict=True):
            ids = model.tokenizer(words, add_special_tokens=False)["input_ids"][:length]
            torch.testing.assert_close(vectors, expected[ids], atol=1e-6, rtol=0)
    with pytest.raises(RecipeError, match="model.token_table .* cannot be loaded"):
        build_token_table(ColBERTSection(token_table=str(tmp_path.parent)), 0, tmp_path / "other")
    with pytest.raises(RecipeError, match="model.embedding_size must be 16 or null, because model.name_or_path .*"):
        load_model(ColBERTSection(name_or_path=str(tmp_path), embedding_size=8), "cpu", 0)
