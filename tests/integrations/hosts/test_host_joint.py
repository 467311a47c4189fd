"""Queries and documents of a loss of Sentence Transformers in one call of the encoder, and what is encoded apart."""

from functools import partial
from importlib.metadata import version

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.sentence_transformers import padding_free
from tests.support.hosts import OF_SENTENCE_TRANSFORMERS, each_host, encoder_calls

MULTI_VECTOR = OF_SENTENCE_TRANSFORMERS[:1]
# Calls for queries and documents apart. Releases from 6 on merge the columns of documents themselves.
APART = 2 if int(version("sentence_transformers").partition(".")[0]) >= 6 else 3


def assert_calls(host, model, step, expected: int, **options) -> None:
    """Steps are those of stock, and make so many calls of the encoder once wide and narrow columns were looked at."""
    made = encoder_calls(model)
    stock = step.run()
    host.enable(**options)
    for _ in range(3):
        made.clear()
        step.assert_equal(step.run(), stock)
    assert len(made) == expected


def is_query(features: dict, queries: dict) -> bool:
    """Trials have no task. Nor has a SparseEncoder one in some releases."""
    if "task" in queries:
        return features.get("task", "query") == "query"
    return torch.equal(features["input_ids"], queries["input_ids"])


def flipped(features: dict, queries: dict) -> dict:
    """Other documents than the loss has. Not other queries: what these lead to is all that could tell of the change."""
    if is_query(features, queries):
        return features
    return {key: value.flip(0) if isinstance(value, torch.Tensor) else value for key, value in features.items()}


def own_call(model, step, flip) -> None:
    class Calls(type(model)):
        def __call__(self, features, *args, **kwargs):
            return super().__call__(flip(features), *args, **kwargs)

    model.__class__ = Calls


def hooked(find):
    return lambda model, _, flip: find(model).register_forward_pre_hook(lambda _, args: (flip(args[0]), *args[1:]))


class Around(nn.Module):
    def __init__(self, model: nn.Module, change) -> None:
        nn.Module.__init__(self)
        self.module, self.change = model, change

    def forward(self, features, *args, **kwargs):
        return self.module(self.change(features), *args, **kwargs)


def wrapped(kind):
    return lambda model, step, flip: setattr(step.loss, "model", kind(model, flip))


class Freezes(Around, DistributedDataParallel):
    def forward(self, features, *args, **kwargs):
        with torch.set_grad_enabled(self.change(features) is features):
            return self.module(features, *args, **kwargs)


def many_tokens(model, step, flip, monkeypatch) -> None:
    monkeypatch.setattr(padding_free, "MOST_TOKENS_BESIDE_QUERIES", 10)


def with_gaps(model, step, flip) -> None:
    step.batch[2]["attention_mask"][0, 1] = 0


def with_an_input_of_their_own(model, step, flip) -> None:
    for column in step.batch[1:]:
        column["position_ids"] = torch.arange(column["input_ids"].shape[1]).expand_as(column["input_ids"])


def expanded(model, step, flip) -> None:
    model[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 10}
    step.batch[0].update(model.preprocess(["a sea"] * len(step.batch[0]["input_ids"]), task="query"))


# What changes, for which hosts, and the line of log.
CHANGES = {
    "nothing": (lambda *_: None, OF_SENTENCE_TRANSFORMERS, None),
    "__call__ of the model": (own_call, OF_SENTENCE_TRANSFORMERS, "Calls is a class of your own"),
    "hook on the encoder": (hooked(lambda model: model[0]), MULTI_VECTOR, "in a call of their own: "),
    "hook on the model": (hooked(lambda model: model), MULTI_VECTOR, "in a call of their own: "),
    "wrapper": (wrapped(Around), OF_SENTENCE_TRANSFORMERS, "in a call of their own: Around is around the model"),
    "no gradients": (wrapped(Freezes), OF_SENTENCE_TRANSFORMERS, None),
    "many tokens": (many_tokens, OF_SENTENCE_TRANSFORMERS, None),
    "a gap": (with_gaps, OF_SENTENCE_TRANSFORMERS, None),
    "an input of documents": (with_an_input_of_their_own, MULTI_VECTOR, "in a call of their own: "),
    "expanded queries": (expanded, MULTI_VECTOR, None),
}


@pytest.mark.parametrize("host, name", [param for name, each in CHANGES.items() for param in each_host(each[1], name)])
def test_what_may_change_documents_before_their_call_has_one(encoder, packed, monkeypatch, caplog, host, name):
    change, _, said = CHANGES[name]
    model = host.model(encoder)
    step = host.losses["contrastive"](model)
    change(model, step, partial(flipped, queries=step.batch[0]), *([monkeypatch] if change is many_tokens else []))
    assert_calls(host, model, step, 1 if name == "nothing" else APART, padding_free="always")
    assert ("in a call of their own: " in caplog.text) == (said is not None) and (said or "") in caplog.text


# Of two and of four columns, and of documents in chunks that are cut to their longest each.
OTHERS = [*each_host(["SparseEncoder"], "pairs"), *each_host(["SparseEncoder"], "margins of several")]
OTHERS += each_host(MULTI_VECTOR, "contrastive in mini-batches")


@pytest.mark.parametrize("host, loss", OTHERS)
def test_one_call_encodes_all_columns_and_chunks(encoder, packed, host, loss):
    model = host.model(encoder)
    assert_calls(host, model, host.losses[loss](model), 1)
