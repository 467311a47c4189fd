"""A ColBERT that is an embedding table becomes a static model with its scores; one that looks at context is refused."""

import pytest
import torch
from pylate.scores import colbert_scores

from pylate_fastmaxsim import StaticLateInteraction
from pylate_fastmaxsim.integrations.pylate.static import from_pylate, token_vectors
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.models.from_scratch import build_token_table
from pylate_fastmaxsim.recipes.models.load import load_model
from tests.support import models

QUERIES, DOCUMENTS = models.sentences(6, longest=10), ["", *models.sentences(20), ". , !"]


def assert_scores(static: StaticLateInteraction, queries: list[torch.Tensor], documents: list[torch.Tensor]) -> None:
    found, positions = static.search(QUERIES, DOCUMENTS, len(DOCUMENTS))
    rows = [[colbert_scores(q[None], d[None]).item() if len(d) else 0.0 for d in documents] for q in queries]
    torch.testing.assert_close(found.gather(1, positions.argsort(dim=1)), torch.tensor(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("threshold", ["lowest", 0.5])
def test_a_token_table_keeps_its_scores(threshold, encoder, tmp_path):
    models.load_model(encoder("bert")).save_pretrained(str(tmp_path / "source"))
    build_token_table(ColBERTSection(token_table=str(tmp_path / "source")), 0, tmp_path / "table")
    model = load_model(ColBERTSection(name_or_path=str(tmp_path / "table"), document_length=64), "cpu", 0)
    vectors = [model.encode(texts, is_query=texts is QUERIES, convert_to_tensor=True) for texts in (QUERIES, DOCUMENTS)]
    assert_scores(from_pylate(model, threshold=threshold), *vectors)


def test_what_stands_around_every_text_is_left_out_and_the_skiplist_of_documents_holds(encoder):
    model = models.load_model(encoder("longrope", num_hidden_layers=0), 64, 64, do_query_expansion=False)
    # [CLS] and the prefix before, [SEP] behind.
    own = [
        [vectors[2:-1] for vectors in model.encode(texts, is_query=texts is QUERIES, convert_to_tensor=True)]
        for texts in (QUERIES, DOCUMENTS)
    ]
    assert len(own[1][-1]) == 0
    assert_scores(from_pylate(model, threshold=0.3), *own)


@pytest.mark.parametrize("layers", [2, 0])  # without layers BERT still has positions
def test_an_encoder_that_looks_at_context_is_refused(layers, encoder):
    model = models.load_model(encoder("bert", num_hidden_layers=layers))
    with pytest.raises(ValueError, match="from_pylate: a token must have the same vector in every text, but .* apart"):
        from_pylate(model, threshold=0.5)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("is_query", [True, False])
def test_vectors_of_tokens_are_those_of_texts_of_one_token(family, is_query, encoder):
    model = models.load_model(encoder(family), do_query_expansion=False)
    found = token_vectors(model, is_query, batch_size=100)
    assert model.training and found.shape == (len(model.tokenizer), 16)
    for word in "abs":
        (token,) = model.tokenizer(word, add_special_tokens=False)["input_ids"]
        ids = model.tokenize([word], is_query=is_query)["input_ids"][0].tolist()
        encoded = model.encode([word], is_query=is_query, convert_to_tensor=True)[0]
        torch.testing.assert_close(found[token], encoded[ids.index(token)], atol=1e-5, rtol=0)
