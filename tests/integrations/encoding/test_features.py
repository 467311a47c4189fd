"""Features of a batch beside ids, mask and token types reach whoever reads them."""

from functools import partial

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from tests.support.encoded import mode_of
from tests.support.models import Behind, collated, load_model, sentences


class _PromptLeftOut(Behind):
    def forward(self, features):
        if "prompt_length" in features:
            embeddings = features["token_embeddings"]
            position = torch.arange(embeddings.shape[1])
            inside = (position > 1) & (position <= features["prompt_length"][:, None])
            features["token_embeddings"] = torch.where(inside[..., None], embeddings[:, :1], embeddings)
        return self.dense(features)


def prompted(model, *columns: str):
    texts = [sentences(6, longest=longest, seed=seed) for seed, longest in enumerate((8, 40, 40))]
    prompts = dict.fromkeys(columns, "because the mountains ")
    return collated(model, *texts, prompts=prompts, include_prompt_lengths=True)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(
    ("columns", "loss_class"),
    [
        (("query", "document_0", "document_1"), partial(losses.CachedContrastive, mini_batch_size=4)),
        (("document_1",), losses.Contrastive),
        (("query",), losses.Contrastive),
    ],
    ids=["all", "negative", "query"],
)
def test_features_reach_a_module_behind_the_encoder_that_reads_them(encoder, mode, caplog, columns, loss_class, reads):
    # Its local layers see all of a query, so that queries would be encoded with packed documents.
    model = load_model(encoder("modernbert", local_attention=24)).double()
    if reads:
        model[1] = _PromptLeftOut(model[1])
    loss_function = loss_class(model)
    stock = [loss_function(prompted(model, *names)).item() for names in ((), columns, ())]
    pylate_fastmaxsim.enable(stock_masking=True, padding_free="always")
    # Such a batch may come after others, and others after it.
    for expected, names in zip(stock, ((), columns, ()), strict=True):
        assert loss_function(prompted(model, *names)).item() == pytest.approx(expected, rel=1e-10)
    said = [message for message in caplog.messages if "_PromptLeftOut may read prompt_length" in message]
    of_documents = [line for line in said if "Documents are encoded with padding" in line]
    assert len(of_documents) == (reads and columns != ("query",))
    assert mode_of(model) == ({mode, "padded"} if of_documents else {mode})
    assert reads or "prompt_length" not in caplog.text


def test_keys_of_texts_that_are_dictionaries(model, mode):
    queries, texts = sentences(6, longest=8), sentences(6, seed=1)
    columns = collated(model, [{"title": query} for query in queries], [{"body": text} for text in texts])
    assert isinstance(columns[0]["text_keys"], list)
    stock = losses.Contrastive(model)([dict(column) for column in columns])
    pylate_fastmaxsim.enable(stock_masking=True)
    torch.testing.assert_close(losses.Contrastive(model)(columns), stock)
    assert mode_of(model) == {mode}
