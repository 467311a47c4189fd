"""What code of the user's own sees: the features of a batch and the gradients of weights that stock gives it.

Which of it keeps the padding is a table in encoding/test_modes.py.
"""

import pytest
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from tests.support.compared import assert_as_stock, assert_equal, run
from tests.support.encoded import batch_of, mode_of
from tests.support.models import Behind, checkpointed, collated, features, load_model


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
