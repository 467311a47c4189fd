"""What code of the user's own sees: the features of a batch and the gradients of weights that stock gives it.

Which of it keeps the padding is a table in encoding/test_modes.py.
"""

from functools import partial

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from tests.support.compared import assert_as_stock, assert_equal, run
from tests.support.encoded import batch_of, mode_of
from tests.support.models import Behind, checkpointed, collated, features, load_model, sentences


class Regularised(losses.Contrastive):
    def forward(self, sentence_features, labels=None):
        return super().forward(sentence_features, labels) + sum(column["term"] for column in sentence_features)


class WithTerm(Behind):
    def change(self, features):
        features["term"] = features["token_embeddings"].square().mean()
        return {**features, "token_embeddings": features["token_embeddings"].tanh()}


def test_what_a_module_leaves_in_the_features_is_there_for_a_loss_built_on_another(encoder):
    model = load_model(encoder("bert")).double()
    model[1] = WithTerm(model[1])
    loss_function, batch = Regularised(model), batch_of(model, collate=collated)
    stock = run(loss_function, [without_total(column) for column in batch])
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_on_weights_see_the_gradients_that_stock_gives_them(encoder, mode, caplog, reentrant):
    model = load_model(encoder("bert")).double()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    if reentrant:  # each layer's call has a backward of its own
        checkpointed(model, reentrant=True)
    assert_as_stock(losses.Contrastive(model), batch_of(model, collate=features))
    assert mode_of(model) == {"padded" if reentrant else mode}
    said = "a hook of your own is on the gradient of 0.auto_model.embeddings.word_embeddings.weight"
    assert (said in caplog.text) == reentrant


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
