"""From token ids to results: queries are encoded by a SparseEncoder of BERT-base's sizes and searched in an index.

Weights are random. The bias of each term in the vocabulary head is chosen so that the term is in about as many queries as
in those of the synthetic collection, or the encoded queries would share far fewer terms with its documents.
"""

from __future__ import annotations

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.models import SpladePooling
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from benchmarks.retrieval.sparse_data import QUERY_TERMS, VOCABULARY, mean_draws, presence, term_law
from pylate_fastmaxsim import SparseBatch

TOKENS = 16  # of a query
SAMPLE = 64  # queries from which biases are chosen


class Logits(torch.nn.Module):
    """A masked language model as a SparseEncoder's first module; MLMTransformer loads one from files only."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.model = BertForMaskedLM(config)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.model(features["input_ids"], attention_mask=features["attention_mask"]).logits
        return {**features, "token_embeddings": logits}


def token_ids(rows: int, device: torch.device) -> dict[str, Tensor]:
    """Features of random queries, all of the same length."""
    draw = torch.Generator(device).manual_seed(rows)
    ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=draw, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def build_encoder(device: torch.device, **sizes: int) -> SparseEncoder:
    """BERT-base in bfloat16; ``sizes`` are changes of its configuration."""
    torch.manual_seed(0)
    with device:
        logits = Logits(BertConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes)).bfloat16().eval()
    sample = logits(token_ids(SAMPLE, device))["token_embeddings"].flatten(0, 1).float()
    frequency = presence(term_law(), mean_draws(term_law(), QUERY_TERMS)).to(device)
    quantile = torch.special.ndtri((1 - frequency) ** (1 / TOKENS)).float()  # of one token's logit, nearly normal
    bias = -sample.mean(dim=0) - sample.std(dim=0) * quantile
    logits.model.cls.predictions.decoder.bias.copy_(bias)
    return SparseEncoder(modules=[logits, SpladePooling("max")], device=str(device)).eval()


@torch.no_grad()
def encode(encoder: SparseEncoder, features: dict[str, Tensor]) -> SparseBatch:
    """As ``SparseEncoder.encode`` does behind its tokenizer."""
    return SparseBatch.from_torch(encoder(dict(features))["sentence_embedding"].to_sparse())
