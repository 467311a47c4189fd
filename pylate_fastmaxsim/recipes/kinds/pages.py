"""Models of pages of colpali-engine: ColPali and ColQwen2."""

from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow.compute as pc
import torch
from colpali_engine import loss as losses
from colpali_engine import models
from colpali_engine.collators import VisualRetrieverCollator
from colpali_engine.data import ColPaliEngineDataset
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
from datasets import Dataset, Image
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from pylate_fastmaxsim.comparison.trainer import count_tokens
from pylate_fastmaxsim.pooling import LogSumExp, Max
from pylate_fastmaxsim.recipes.config.kinds import WITH_NEGATIVES, PagesLoss, PagesSection
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.tables import require_text_columns
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.retriever import PageModel, retriever_of
from pylate_fastmaxsim.recipes.trainers.gradients import LogGradientConcentration, encode_pairs
from pylate_fastmaxsim.recipes.trainers.sharded import WholeModelMixin

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
# Pairs of which gradients are measured: few, because each page has hundreds of tokens.
MEASURED_PAIRS = 8


class PageTrainer(WholeModelMixin, ContrastiveTrainer):
    """colpali-engine's trainer, which hands back whole models, also under FSDP and DeepSpeed."""

    def __init__(self, *, retriever: PageModel, **kwargs: Any) -> None:
        self.retriever = retriever
        super().__init__(model=retriever.model, **kwargs)

    def whole_model(self) -> PageModel | None:
        """The model with its processor; see :meth:`WholeModelMixin.whole_model`."""
        model = super().whole_model()
        return None if model is None else PageModel(model, self.retriever.processor)

    def _filled(self, weights: dict[str, Any]) -> PreTrainedModel | PeftModel:
        # FSDP unties weights, and trains those that are used: ColPali's output head must not overwrite its embeddings.
        own = {name: weights[name] for name, _ in self._whole.named_parameters()}
        own |= {name: weights[name] for name, _ in self._whole.named_buffers() if name in weights}
        self._whole.load_state_dict(own, strict=False)
        return self._whole


class Pages(Kind):
    """``model.kind: colpali`` and ``colqwen2``."""

    host = "colpali-engine"
    # The collator needs the images; with adapters the inputs of a layer have no gradient.
    arguments = {"remove_unused_columns": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    own_card = {
        "library_name": "colpali",
        "pipeline_tag": "visual-document-retrieval",
        "tags": ["colpali", "late-interaction"],
    }

    def load(self, section: PagesSection, device: torch.device | str, key: str, base: str) -> PageModel:
        model_class, processor_class = CLASSES[section.kind]
        tokens = getattr(section, "max_visual_tokens", None)  # of a ColPali they are fixed
        limits = {} if tokens is None else {"max_num_visual_tokens": tokens}
        processor = processor_class.from_pretrained(base, **limits)
        adapted = section.lora is not None
        model = model_class.from_pretrained(
            base if adapted else section.name_or_path,
            dtype=_dtype(section, torch.device(device)),
            attn_implementation=section.attn_implementation,
        )
        work_around_transformers(model)
        if adapted and section.name_or_path == base:
            options = asdict(section.lora)
            if section.lora.init_lora_weights == "default":
                options["init_lora_weights"] = True
            model = get_peft_model(model, LoraConfig(**options, bias="none", task_type="FEATURE_EXTRACTION"))
        elif adapted:
            model = PeftModel.from_pretrained(model, section.name_or_path)
        return PageModel(model.to(device), processor)

    def fit_columns(self, recipe: Recipe, dataset: Dataset) -> Dataset:
        """Refuse columns other than a query, its page and, for losses with negatives, equally many of them in each row."""
        columns, negatives = dataset.column_names, recipe.loss.name in WITH_NEGATIVES
        if len(columns) != 2 + negatives:
            wanted = "[query, image, negatives]" if negatives else "[query, image]"
            raise RecipeError(
                f"data.columns must be {wanted} for the loss {recipe.loss.name}, got [{', '.join(columns)}]."
            )
        query, *images = columns
        require_text_columns(dataset, [query], "data")
        for column in images:
            feature = dataset.features[column]
            if not isinstance(getattr(feature, "feature", feature), Image):
                raise RecipeError(f"data.columns: {column!r} must hold images, but it holds {feature}.")
        if negatives and not isinstance(dataset.features[columns[2]], Image):
            counts = pc.list_value_length(dataset.data.column(columns[2])).unique().to_pylist()
            if len(counts) > 1:
                raise RecipeError(
                    f"data.columns: every row of {columns[2]!r} must hold the same number of images, "
                    f"but rows hold {min(counts)} to {max(counts)}."
                )
        return dataset

    def build_trainer(
        self, loss: PagesLoss, model: PageModel, rows: Dataset, arguments: TrainingArguments
    ) -> PageTrainer:
        """colpali-engine's trainer, with its collator and the loss of the recipe."""
        query, page, *negatives = rows.column_names
        columns = {"query_column_name": query, "pos_target_column_name": page}
        if negatives:
            columns["neg_target_column_name"] = negatives[0]
        return PageTrainer(
            loss_func=LOSSES[loss.name](**loss.options),
            is_vision_model=True,
            retriever=model,
            args=arguments,
            train_dataset=ColPaliEngineDataset(rows, **columns),
            eval_dataset=None,
            data_collator=VisualRetrieverCollator(model.processor),
        )

    def gradient_logger(self, recipe: Recipe, trainer: PageTrainer) -> LogGradientConcentration:
        """The callback of ``training.log_gradient_concentration``, of the scores of the first queries and pages."""
        rows = [trainer.train_dataset[row] for row in range(min(MEASURED_PAIRS, len(trainer.train_dataset)))]
        queries = [row[ColPaliEngineDataset.QUERY_KEY] for row in rows]
        pages = [row[ColPaliEngineDataset.POS_TARGET_KEY][0] for row in rows]
        loss = trainer.loss_func
        return LogGradientConcentration(
            trainer,
            partial(encode_pairs, retriever_of(trainer.retriever), queries, pages),
            recipe.training.log_gradient_concentration,
            pooling=LogSumExp(loss.tau) if loss.use_smooth_max else Max(),
            temperature=None,
        )

    def count(self, model: PageModel, inputs: dict[str, Any]) -> dict[str, Any]:
        """Numbers of tokens; stock and fast, every page is padded to the longest of its batch."""
        return count_tokens(inputs)


KIND = Pages()


def _dtype(section: PagesSection, device: torch.device) -> torch.dtype:
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    small = (
        section.lora is not None and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return torch.bfloat16 if small else torch.float32


def work_around_transformers(model: PreTrainedModel) -> None:
    """Work around bugs of colpali-engine 0.3.18 with transformers 5.3, stock and fast alike."""
    # Saved under the original names, weights could not be loaded again.
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    if isinstance(model, models.ColPali):
        # colpali-engine leaves the unused language model head untied, without weights that could move to a GPU.
        model.model.tie_weights()
    # Not a hook: adapters call forward directly.
    model.forward = partial(_forward, model)


def _forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(model, models.ColQwen2):
        # Otherwise positions of texts use the offsets of the last batch of images, and fail if its size differs.
        model.rope_deltas = None
    else:
        # Required in training; 0 (prompt) is also what queries have in evaluation.
        kwargs.setdefault("token_type_ids", torch.zeros_like(kwargs["input_ids"]))
    return type(model).forward(model, *args, **kwargs)
