"""The keys of a recipe that depend on ``model.kind``."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, get_type_hints

from pylate_fastmaxsim.integrations.options import OPTIONS, PYLATE, SENTENCE_TRANSFORMERS
from pylate_fastmaxsim.recipes.config.parse import build
from pylate_fastmaxsim.recipes.config.schema import (
    EvaluationSection,
    FastSection,
    LateEvaluationSection,
    LossSection,
    MiningSection,
    ModelSection,
    PoolingSection,
    Recipe,
    TextEvaluationSection,
    TrainingSection,
    key,
)
from pylate_fastmaxsim.recipes.errors import RecipeError

CONTRASTIVE = ("contrastive", "cached_contrastive")
CACHED, DISTILLATION = ("cached_contrastive",), ("distillation",)
TextLoss = Literal["contrastive", "cached_contrastive", "distillation"]
Objective = Literal["kl_divergence", "margin_mse"]
POSITIONS = 8192  # of a model from scratch: tokens of a text


@dataclass(frozen=True)
class BuildSection:
    """A small ModernBERT with random weights, and a BPE tokenizer trained on the recipe's own text.

    For ``model.kind: splade`` it has the head of a masked language model. The names are those of
    ``transformers.ModernBertConfig``; ``dropout`` sets all of its dropouts.
    """

    vocab_size: int = key(8192, minimum=512)
    hidden_size: int = key(128, minimum=2)
    num_hidden_layers: int = key(4, minimum=1)
    num_attention_heads: int = key(2, minimum=1)
    intermediate_size: int = key(256, minimum=1)
    local_attention: int = key(128, minimum=2)
    global_attn_every_n_layers: int = key(3, minimum=1)
    dropout: float = key(0.0, minimum=0, maximum=1)


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters; the names are those of ``peft.LoraConfig``. ``target_modules`` is a regular expression."""

    target_modules: str
    r: int = key(32, minimum=1)
    lora_alpha: int = key(32, minimum=1)
    lora_dropout: float = key(0.1, minimum=0, maximum=1)
    init_lora_weights: Literal["gaussian", "default"] = "gaussian"


@dataclass(frozen=True)
class TextModelSection(ModelSection):
    """A text encoder: ``name_or_path`` on the Hub or on disk, or ``build`` for one made from scratch.

    ``config_kwargs`` goes to the configuration of the encoder (for example its dropouts). Code that comes with a checkpoint
    runs only if ``trust_remote_code`` is true.
    """

    build: BuildSection | None = None
    config_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


@dataclass(frozen=True)
class LateModelSection(TextModelSection):
    """A text encoder with late interaction. null keeps the value of the checkpoint."""

    embedding_size: int | None = key(None, minimum=1)
    query_length: int | None = key(None, minimum=3)
    document_length: int | None = key(None, minimum=3)
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None

    length = "document_length"


@dataclass(frozen=True)
class ColBERTSection(LateModelSection):
    """A text encoder trained with PyLate: ``name_or_path``, ``build`` for one made from scratch, or ``token_table``.

    Keys that are not named here are arguments of ``pylate.models.ColBERT``; null keeps the value of the checkpoint.
    ``embedding_size`` is for encoders without a projection. ``config_kwargs`` goes to the configuration of the encoder
    (for example its dropouts). Code that comes with a checkpoint runs only if ``trust_remote_code`` is true.

    ``token_table`` names a ColBERT, on the Hub or on disk. A ColBERT is made of it whose encoder is a table: each token
    of the vocabulary has one vector, at first that which the named model gives it in a text of this token alone. A text
    is its own tokens, without special tokens and prefixes. Lengths that are null are those of the named model.
    """

    kind: Literal["colbert"] = "colbert"
    token_table: str | None = key(None, on_hub="a model")


@dataclass(frozen=True)
class MultiVectorSection(LateModelSection):
    """A MultiVectorEncoder of Sentence Transformers 6, saved by it or by PyLate, or made of an encoder.

    Keys are those of a colbert, and ``attn_implementation`` of transformers. ``embedding_size`` is for encoders without a
    projection, where null is 128. ``query_length`` of queries that are expanded is the length of all of them.
    """

    kind: Literal["multi_vector"] = "multi_vector"
    attn_implementation: str | None = None


@dataclass(frozen=True)
class SpladeSection(TextModelSection):
    """A SparseEncoder of Sentence Transformers, saved by it or made of a masked language model.

    ``max_seq_length`` is the largest number of tokens of a text; null keeps that of the checkpoint. ``inference_free``
    gives queries a weight for each token of the vocabulary in place of the encoder.
    """

    kind: Literal["splade"] = "splade"
    max_seq_length: int | None = key(None, minimum=3)
    inference_free: bool = False

    length = "max_seq_length"


@dataclass(frozen=True)
class PagesSection(ModelSection):
    """A model that retrieves images of pages, trained with colpali-engine (the extra [colpali]).

    ``lora`` trains adapters only; null trains all weights. ``dtype`` is that of the weights: auto is bfloat16 for adapters
    on a GPU that has it, and float32 otherwise. ``attn_implementation`` is that of transformers.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attn_implementation: str | None = None
    lora: LoraSection | None = None

    visual = True


@dataclass(frozen=True)
class ColPaliSection(PagesSection):
    """A ColPali, whose pages all have one size."""

    kind: Literal["colpali"] = "colpali"


@dataclass(frozen=True)
class ColQwen2Section(PagesSection):
    """A ColQwen2. ``max_visual_tokens`` is the largest number of tokens of a page."""

    kind: Literal["colqwen2"] = "colqwen2"
    max_visual_tokens: int | None = key(None, minimum=1)

    length = "max_visual_tokens"


@dataclass(frozen=True)
class ColBERTLoss(LossSection):
    """A loss of PyLate. ``pooling`` is that of its scores and of the evaluation; null or ``max`` is the maximum."""

    name: TextLoss = "contrastive"
    temperature: float | None = key(None, above=0, only=CONTRASTIVE)
    size_average: bool | None = None
    mini_batch_size: int | None = key(None, minimum=1, only=CACHED)
    score_mini_batch_size: int | None = key(None, minimum=1, only=CONTRASTIVE)
    gather_across_devices: bool | None = key(None, only=CONTRASTIVE)
    normalize_scores: bool | None = key(None, only=DISTILLATION)
    pooling: PoolingSection | None = key(None, null="max")


@dataclass(frozen=True)
class MultiVectorLoss(LossSection):
    """A loss of late interaction of Sentence Transformers.

    That is contrastive, ``cached_contrastive`` with mini-batches of ``mini_batch_size`` texts or ``mini_batch_num_tokens``
    tokens, and for distillation the KL divergence (null too) or the margins, as ``objective`` says. Scores are divided by
    ``temperature``; null is 1. ``pooling`` is that of the scores and of the evaluation; null or ``max`` is the maximum.
    """

    name: TextLoss = "contrastive"
    temperature: float | None = key(None, above=0)
    mini_batch_size: int | None = key(None, minimum=1)
    mini_batch_num_tokens: int | None = key(None, minimum=1, only=CACHED)
    score_mini_batch_size: int | None = key(None, minimum=1, only=CONTRASTIVE)
    gather_across_devices: bool | None = key(None, only=CONTRASTIVE)
    pooling: PoolingSection | None = key(None, null="max")
    objective: Objective | None = key(None, only=DISTILLATION)


@dataclass(frozen=True)
class RegularizersSection:
    """The regularizers that make the vectors of a SPLADE sparse, those of Sentence Transformers' ``SpladeLoss``.

    ``flops`` is the sum over the vocabulary of the squared mean weight in a batch, ``l1`` the mean sum of a vector's
    weights. A side without a weight has none. Of ``flops``, vectors with at most ``threshold`` non-zeros count as zero.
    The weights rise from 0 over the part ``warmup_ratio`` of the training, in proportion to the steps (``linear``) or to
    their square (``quadratic``).
    """

    document_weight: float = key(minimum=0)
    query_weight: float | None = key(None, minimum=0)
    document: Literal["flops", "l1"] = "flops"
    query: Literal["flops", "l1"] = "flops"
    document_threshold: int | None = key(None, minimum=0)
    query_threshold: int | None = key(None, minimum=0)
    schedule: Literal["linear", "quadratic"] = "quadratic"
    warmup_ratio: float = key(1 / 3, above=0, maximum=1)


@dataclass(frozen=True)
class SpladeLoss(LossSection):
    """Sentence Transformers' ``SpladeLoss`` with ``regularizers``.

    It is ``CachedSpladeLoss`` for ``cached_contrastive`` and for distillation with a ``mini_batch_size``. Scores are divided
    by ``temperature``; null is 1, or 2 for the KL divergence. ``objective`` is what a distillation minimises: the KL
    divergence from the teacher's scores (null too), or the mean squared error of the margins between the first document
    and the others.
    """

    name: TextLoss = "contrastive"
    temperature: float | None = key(None, above=0)
    mini_batch_size: int | None = key(None, minimum=1, only=CACHED + DISTILLATION)
    gather_across_devices: bool | None = key(None, only=CONTRASTIVE)
    objective: Objective | None = key(None, only=DISTILLATION)
    regularizers: RegularizersSection | None = None


WITH_NEGATIVES = ("colbert_negative_ce", "colbert_pairwise_negative_ce")


@dataclass(frozen=True)
class PagesLoss(LossSection):
    """A loss of colpali-engine: ``colbert_pairwise_ce`` is its ``ColbertPairwiseCELoss``, and so on."""

    name: Literal[
        "colbert", "colbert_pairwise_ce", "colbert_sigmoid", "colbert_negative_ce", "colbert_pairwise_negative_ce"
    ] = "colbert"
    temperature: float | None = key(None, above=0)
    normalize_scores: bool | None = None
    use_smooth_max: bool | None = None
    tau: float | None = key(None, above=0)
    pos_aware_negative_filtering: bool | None = None
    filter_threshold: float | None = None
    filter_factor: float | None = None
    in_batch_term_weight: float | None = key(None, minimum=0, maximum=1, only=WITH_NEGATIVES)
    norm_tol: float | None = key(None, minimum=0)
    max_batch_size: int | None = key(None, minimum=1)


@dataclass(frozen=True)
class PagesTraining(TrainingSection):
    """``log_gradient_concentration`` is every how many steps it is logged how concentrated gradients are on few document
    tokens (docs/diagnostics.md); null: never."""

    log_gradient_concentration: int | None = key(None, minimum=1)


@dataclass(frozen=True)
class TextTraining(TrainingSection):
    """``batch_sampler`` is that of Sentence Transformers."""

    batch_sampler: Literal["batch_sampler", "no_duplicates"] = "batch_sampler"


@dataclass(frozen=True)
class LateTraining(TextTraining):
    """``log_gradient_concentration`` is every how many steps it is logged how concentrated gradients are on few document
    tokens (docs/diagnostics.md); null: never."""

    log_gradient_concentration: int | None = key(None, minimum=1)


@dataclass(frozen=True)
class SpladeTraining(TextTraining):
    """``query_learning_rate`` is that of the weights of queries of an inference-free model, which need a larger one than an
    encoder; null: ``learning_rate``."""

    query_learning_rate: float | None = key(None, minimum=0)


def _fast_section(name: str, host: str) -> type[FastSection]:
    """The section ``fast`` of the kinds that a host trains; the option ``pooling`` is ``loss.pooling``."""
    switches = [option for option in OPTIONS if isinstance(option.default, bool) and host in option.metadata["hosts"]]
    keys = [(option.name, bool, field(default=option.default)) for option in switches]
    return make_dataclass(name, keys, bases=(FastSection,), namespace={"__module__": __name__}, frozen=True)


PyLateFast = _fast_section("PyLateFast", PYLATE)
SentenceTransformersFast = _fast_section("SentenceTransformersFast", SENTENCE_TRANSFORMERS)


def _recipe(model: type[ModelSection], mining: bool = False, **sections: type) -> type[Recipe]:
    """The class of the recipes of a kind, by the sections that it has."""
    keys = [("model", model), *((name, section, field(default_factory=section)) for name, section in sections.items())]
    if mining:
        keys.append(("mining", MiningSection | None, None))
    name = model.__name__.removesuffix("Section") + "Recipe"
    return make_dataclass(name, keys, bases=(Recipe,), namespace={"__module__": __name__}, frozen=True)


_LATE = {"training": LateTraining, "evaluation": LateEvaluationSection, "mining": True}
_PAGES = {"loss": PagesLoss, "training": PagesTraining, "fast": FastSection, "evaluation": EvaluationSection}

RECIPES: dict[str, type[Recipe]] = {
    "colbert": _recipe(ColBERTSection, loss=ColBERTLoss, fast=PyLateFast, **_LATE),
    "multi_vector": _recipe(MultiVectorSection, loss=MultiVectorLoss, fast=SentenceTransformersFast, **_LATE),
    "splade": _recipe(
        SpladeSection,
        loss=SpladeLoss,
        training=SpladeTraining,
        fast=SentenceTransformersFast,
        evaluation=TextEvaluationSection,
    ),
    "colpali": _recipe(ColPaliSection, **_PAGES),
    "colqwen2": _recipe(ColQwen2Section, **_PAGES),
}
MODELS: dict[str, type[ModelSection]] = {kind: get_type_hints(recipe)["model"] for kind, recipe in RECIPES.items()}


def build_recipe(values: dict[str, Any]) -> Recipe:
    """The recipe of plain values, with the sections of its kind."""
    model = values.get("model")
    kind = model.get("kind", "colbert") if isinstance(model, dict) else "colbert"
    if kind not in list(RECIPES):  # a list, because it may be anything
        raise RecipeError(f"model.kind must be one of {', '.join(RECIPES)}, got {kind!r}.")
    return build(RECIPES[kind], values, "", f" with model.kind {kind}")
