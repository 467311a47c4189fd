"""Retrieval of pages by their images: the model, the trainer and the evaluation of a recipe, with colpali-engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from colpali_engine import loss as losses
from colpali_engine import models
from colpali_engine.collators import VisualRetrieverCollator
from colpali_engine.data import ColPaliEngineDataset
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, TrainingArguments

from pylate_fastmaxsim.recipes.comparison.counters import Counted
from pylate_fastmaxsim.recipes.comparison.phases import Phases
from pylate_fastmaxsim.recipes.config.schema import LoraSection, ModelSection
from pylate_fastmaxsim.recipes.evaluation.finite import require_finite
from pylate_fastmaxsim.recipes.models.hardware import gpu_has_bf16
from pylate_fastmaxsim.recipes.training.sharded import Undivided

CLASSES = {
    "colpali": (models.ColPali, models.ColPaliProcessor),
    "colqwen2": (models.ColQwen2, models.ColQwen2Processor),
}
LOSSES = {
    "colbert": losses.ColbertLoss,
    "colbert_pairwise_ce": losses.ColbertPairwiseCELoss,
    "colbert_sigmoid": losses.ColbertSigmoidLoss,
    "colbert_negative_ce": losses.ColbertNegativeCELoss,
    "colbert_pairwise_negative_ce": losses.ColbertPairwiseNegativeCELoss,
}
METRIC = "ndcg@10"
DEPTH = 10


@dataclass(frozen=True)
class VisualRetriever:
    """A model of colpali-engine, with adapters or without, and the processor that makes its inputs."""

    model: PreTrainedModel | PeftModel
    processor: BaseVisualRetrieverProcessor

    def save_pretrained(self, directory: str) -> None:
        """Save both, so that ``from_pretrained`` of colpali-engine's classes loads them."""
        self.model.save_pretrained(directory)
        self.processor.save_pretrained(directory)


def load_retriever(
    section: ModelSection, device: torch.device | str, checkpoint: Path | None = None
) -> VisualRetriever:
    """The model of a section; what its checkpoint on the Hub lacks is drawn from the random numbers in force.

    Parameters
    ----------
    section
        A section of ``kind`` colpali or colqwen2.
    device
        Where the weights go.
    checkpoint
        A checkpoint of the training of this section, whose weights are taken.
    """
    model_class, processor_class = CLASSES[section.kind]
    limits = {} if section.max_visual_tokens is None else {"max_num_visual_tokens": section.max_visual_tokens}
    processor = processor_class.from_pretrained(section.name_or_path, **limits)
    adapted = section.lora is not None
    model = model_class.from_pretrained(
        section.name_or_path if adapted or checkpoint is None else checkpoint,
        dtype=_dtype(section, torch.device(device)),
        attn_implementation=section.attn_implementation,
    )
    work_around_transformers(model)
    if adapted and checkpoint is None:
        model = get_peft_model(model, _lora(section.lora))
    elif adapted:
        model = PeftModel.from_pretrained(model, checkpoint)
    return VisualRetriever(model.to(device), processor)


def _dtype(section: ModelSection, device: torch.device) -> torch.dtype:
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    small = section.lora is not None and device.type == "cuda" and gpu_has_bf16()
    return torch.bfloat16 if small else torch.float32


def _lora(section: LoraSection) -> LoraConfig:
    options = asdict(section)
    if section.init_lora_weights == "default":
        options["init_lora_weights"] = True
    return LoraConfig(**options, bias="none", task_type="FEATURE_EXTRACTION")


def work_around_transformers(model: PreTrainedModel) -> None:
    """Let a model of colpali-engine 0.3.18 be trained and saved under transformers 5.3, stock and fast alike."""
    # The renaming of old checkpoints is applied backwards on saving, and what is written then cannot be read back.
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    if isinstance(model, models.ColPali):
        # colpali-engine ties the weights of the text model only; the head of words, which it does not use, is left
        # without any, and cannot be moved to a GPU.
        model.model.tie_weights()
    # Not a hook: adapters call forward itself.
    model.forward = partial(_forward, model)


def _forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(model, models.ColQwen2):
        # Texts are shifted by the offsets of the last batch of images, which fails if that had another size.
        model.rope_deltas = None
    else:
        # In training the type of every token must be given; 0, the prompt, is what a query has in evaluation.
        kwargs.setdefault("token_type_ids", torch.zeros_like(kwargs["input_ids"]))
    return type(model).forward(model, *args, **kwargs)


def build_page_trainer(
    loss: str,
    options: dict[str, Any],
    retriever: VisualRetriever,
    rows: Dataset,
    arguments: TrainingArguments,
    trainer_class: type[PageTrainer] | None,
) -> PageTrainer:
    """colpali-engine's trainer, with its collator and a loss of its own by the recipe's name for it."""
    query, page, *negatives = rows.column_names
    columns = {"query_column_name": query, "pos_target_column_name": page}
    if negatives:
        columns["neg_target_column_name"] = negatives[0]
    return (trainer_class or PageTrainer)(
        loss_func=LOSSES[loss](**options),
        is_vision_model=True,
        retriever=retriever,
        args=arguments,
        train_dataset=ColPaliEngineDataset(rows, **columns),
        eval_dataset=None,
        data_collator=VisualRetrieverCollator(retriever.processor),
    )


class PageTrainer(Undivided, ContrastiveTrainer):
    """colpali-engine's trainer, which hands back whole models, also under FSDP and DeepSpeed."""

    def __init__(self, *, retriever: VisualRetriever, **kwargs: Any) -> None:
        self._retriever = retriever
        super().__init__(model=retriever.model, **kwargs)

    def whole_model(self) -> VisualRetriever | None:
        """The model with all its weights. Every process must ask; of a divided one only the main process gets it."""
        if not self.divided:
            return self._retriever
        weights = self._gathered()
        if not self.args.should_save:
            return None
        # FSDP unties weights, and trains those that are used: ColPali's output head must not overwrite its embeddings.
        own = {name: weights[name] for name, _ in self._whole.named_parameters()}
        own |= {name: weights[name] for name, _ in self._whole.named_buffers() if name in weights}
        self._whole.load_state_dict(own, strict=False)
        return VisualRetriever(self._whole.to(self.args.device), self._retriever.processor)


class MeasuredPageTrainer(Counted, PageTrainer):
    """The trainer of models of pages, which counts.

    A vision-language model is given every page padded to the longest of its batch, stock and fast.
    """

    def count(self, inputs: dict[str, Any]) -> None:
        queries = inputs[f"{self.query_prefix}input_ids"].numel()
        self.measured["query_tokens"] += queries
        self.measured["encoded"] += queries
        for prefix in (self.pos_prefix, self.neg_prefix):
            mask = inputs.get(f"{prefix}attention_mask")
            if mask is not None:
                self.measured["documents"] += mask.shape[:-1].numel()
                self.measured["live"] += mask.sum()
                self.measured["encoded"] += mask.numel()


class PagePhaseTrainer(Phases, PageTrainer):
    """The trainer of models of pages with a stopwatch."""


def evaluate_pages(retriever: VisualRetriever, held_out: Dataset, batch_size: int) -> dict[str, float]:
    """nDCG@10 of the held-out queries over all held-out pages, scored by the processor of the model.

    The relevant page of a query is its own, which others may have as well: pages are told apart by their pixels. A
    query that stands in several rows has the pages of all of them.
    """
    # Imported where it is used: ranx compiles for seconds when it is imported.
    from ranx import Qrels, Run, evaluate

    query_column, page_column, *_ = held_out.column_names
    texts: dict[str, str] = {}
    pages: dict[str, Image.Image] = {}
    relevant: dict[str, dict[str, int]] = {}
    for number, row in enumerate(held_out):
        own = row[page_column] if isinstance(row[page_column], list) else [row[page_column]]
        names = [_name(page) for page in own]
        pages |= dict(zip(names, own, strict=True))
        query = texts.setdefault(row[query_column], f"q{number}")
        relevant.setdefault(query, {}).update(dict.fromkeys(names, 1))
    processor, model = retriever.processor, retriever.model
    queries = _encode(model, list(texts), processor.process_queries, batch_size, "Encoding queries")
    documents = _encode(model, list(pages.values()), processor.process_images, batch_size, "Encoding pages")
    scores = processor.score(queries, documents, device=model.device)
    best = scores.topk(min(DEPTH, len(pages)), dim=1)
    names = list(pages)
    run = {
        query: {names[place]: score for place, score in zip(places, values, strict=True)}
        for query, places, values in zip(relevant, best.indices.tolist(), best.values.tolist(), strict=True)
    }
    return {METRIC: float(evaluate(Qrels(relevant), Run(run), METRIC, make_comparable=True))}


def _name(page: Image.Image) -> str:
    return sha256(repr((page.mode, page.size)).encode() + page.tobytes()).hexdigest()


@torch.no_grad()
def _encode(
    model: nn.Module, items: Sequence[Any], process: Callable, batch_size: int, description: str
) -> list[Tensor]:
    """Token vectors of each item, with rows of zeros where its batch was padded."""
    model.eval()
    embeddings: list[Tensor] = []
    for batch in _batches(items, batch_size, description):
        embeddings += model(**process(batch).to(model.device)).cpu().unbind()
    require_finite(embeddings)
    return embeddings


def _batches(items: Sequence[Any], batch_size: int, description: str) -> Iterator[list[Any]]:
    with tqdm(total=len(items), desc=description) as progress:
        for begin in range(0, len(items), batch_size):
            batch = list(items[begin : begin + batch_size])
            yield batch
            progress.update(len(batch))
