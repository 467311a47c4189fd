"""PyLate's losses on stored token embeddings: a training step without the encoder."""

from __future__ import annotations

import random
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import convert_outputs_to_fp32
from pylate import losses
from torch import Tensor, nn

from benchmarks.harness.lengths import MEAN_TOKENS, log_normal
from benchmarks.harness.timing import DEVICE
from benchmarks.training.losses import TITLES
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, TokenCounts
from pylate_fastmaxsim.integrations.options import current_options

QUERY_LENGTH = 32
DIM = 128
VOCABULARY = 30_000
MINI_BATCH = 32

Features = list[dict[str, Tensor]]

# The embeddings that each model returned. Not an attribute: documents of a model that changes in its forward are padded.
_leaves: WeakKeyDictionary[nn.Module, dict[tuple, Tensor]] = WeakKeyDictionary()


class Embedded(nn.Module):
    """In place of a ColBERT model: returns stored bfloat16 embeddings, leaves with gradients, for each call.

    The loss gets them in float32, as accelerate converts the outputs of a model that trains in bf16.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.lookup = _Lookup(torch.randn(VOCABULARY, DIM, device=DEVICE, generator=generator).bfloat16())
        self.tokenizer = SimpleNamespace(padding_side="right")
        self.skiplist: list[int] = []
        self.do_query_expansion = True
        self.attend_to_expansion_tokens = False
        self.query_length = QUERY_LENGTH
        self.forward = convert_outputs_to_fp32(self.forward)

    def _first_module(self) -> nn.Module:
        return self.lookup

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.lookup(features)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for leaf in _leaves[self.lookup].values():
            leaf.grad = None


class _Lookup(nn.Module):
    model_forward_params = frozenset({"input_ids", "attention_mask", "position_ids"})

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        _leaves[self] = {}
        self.known: set[int] = set()
        self.auto_model = nn.Module()
        self.auto_model.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = features["input_ids"]
        if not self.training:
            return {"token_embeddings": self.table[ids]}
        # The key of a column or a part of it is its memory; of packed documents, which are new tensors, their size.
        memory = ids.untyped_storage()
        made = memory.data_ptr() if memory.data_ptr() in self.known else memory.nbytes()
        key = (made, ids.storage_offset(), ids.shape)
        leaves = _leaves[self]
        if key not in leaves:
            with torch.no_grad():
                leaves[key] = self.table[ids]
            leaves[key].requires_grad_()
        return {"token_embeddings": leaves[key]}


def make_features(
    model: Embedded, queries: int, columns: int, document_length: int, seed: int, one_column: bool = False
) -> Features:
    """A padded batch as from the collator: queries and ``columns`` of as many documents, with log-normal lengths.

    With ``one_column`` all documents are in one column, as in distillation.
    """
    draw = random.Random(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def column(lengths: list[int], length: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCABULARY, (len(lengths), length), generator=generator, device=DEVICE)
        model.lookup.known.add(ids.untyped_storage().data_ptr())
        live = torch.arange(length, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
        return {"input_ids": ids, "attention_mask": live.long(), TOKEN_TOTAL: TokenCounts.of(live)}

    def documents(count: int) -> dict[str, Tensor]:
        drawn = (log_normal(MEAN_TOKENS, draw) for _ in range(count))
        return column([min(max(length, 3), document_length) for length in drawn], document_length)

    shape = (1, queries * columns) if one_column else (columns, queries)
    return [column([QUERY_LENGTH] * queries, QUERY_LENGTH), *(documents(shape[1]) for _ in range(shape[0]))]


class Step:
    """A call is forward + backward of one loss on one batch, from token embeddings to their gradients."""

    def __init__(self, loss: str, queries: int, columns: int, document_length: int, seed: int) -> None:
        self.model = Embedded().train()
        one_column = loss == "distillation"
        self.features = make_features(self.model, queries, columns, document_length, seed, one_column)
        self.labels = torch.linspace(0, 1, columns, device=DEVICE).expand(queries, -1) if one_column else None
        options = {} if one_column else {"temperature": 0.02}
        if loss == "cached_contrastive":
            options["mini_batch_size"] = MINI_BATCH
        self.loss_function = getattr(losses, TITLES[loss])(self.model, **options)

    def __call__(self) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = self.loss_function([dict(column) for column in self.features], self.labels)
        loss.backward()
        if current_options() is not None and "padded" in modes.chosen[self.model].values():
            raise RuntimeError("The documents were padded, so this would not measure packed ones.")
        # At the end, so that gradients count in the memory of their step.
        self.model.zero_grad()
        return loss.detach()
