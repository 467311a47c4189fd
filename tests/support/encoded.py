"""Documents encoded without padding, against the token embeddings of stock PyLate."""

from functools import partial

import torch
from pylate.losses import contrastive
from torch import nn

from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.plans import token_embeddings
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from tests.support import compared
from tests.support.models import Behind, collated, looking

batch_of = partial(compared.batch_of, collate=collated)


class Normalised(Behind):
    def __init__(self, dense):
        super().__init__(dense)
        self.norm = nn.BatchNorm1d(16).double()

    def change(self, features):
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": self.norm(embeddings.flatten(0, 1)).view_as(embeddings)}


def encode(model, batch):
    plan = encoding_encode.plan_documents(model, batch[1:], unwrap(model).skiplist)
    return plan.batch([token_embeddings(model, call) for call in plan.calls])


def tokens_of(batch):
    values, mask = batch.to_padded()
    return [rows[live] for rows, live in zip(values, mask, strict=True)]


def padded_tokens(model, batch):
    masks = contrastive.extract_skiplist_mask(batch, model.skiplist)[1:]
    outputs = [model(without_total(column))["token_embeddings"] for column in batch[1:]]
    return [rows[live] for pair in zip(outputs, masks, strict=True) for rows, live in zip(*pair, strict=True)]


def assert_encodes_as_stock(model, batch, tolerance: float = 1e-10):
    torch.testing.assert_close(tokens_of(encode(model, batch)), padded_tokens(model, batch), atol=tolerance, rtol=0)


def mode_of(model) -> set[str]:
    return set(modes.chosen[model].values())


def calls_of(model, action) -> list[dict]:
    calls = []
    hook = model[0].register_forward_pre_hook(looking(lambda _module, args: calls.append(dict(args[0]))))
    action()
    hook.remove()
    return calls
