"""The keys of a recipe that depend on ``model.kind``."""

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

# Meanings of keys that losses of several kinds have.
_NAME = "loss; cached_contrastive is GradCache"
_SCALE = "scores are divided by it"
_MINI_BATCH = "texts in a call of the encoder, of GradCache"
_SCORED = "queries that are scored at once"
_GATHER = "documents of all processes are negatives"
_POOLING = "pooling of scores and evaluation in place of the maximum"
_OBJECTIVE = "KL divergence from the teacher's scores, or mean squared error of margins"
_THRESHOLD = "of `flops`, vectors with at most so many non-zeros count as zero"
_POOL_FACTORS = "sum of the loss over documents pooled by token pooling, tokens per vector"
_POOL_WEIGHTS = "weights of this sum; null: all 1"
_CONCENTRATION = "log how concentrated gradients are every so many (docs/compare.md); null: never"


@dataclass(frozen=True)
class BuildSection:
    """A small ModernBERT with random weights, and a BPE tokenizer trained on the recipe's own text.

    For ``model.kind: splade`` it has the head of a masked language model. The names are those of
    ``transformers.ModernBertConfig``; ``dropout`` sets all of its dropouts.
    """

    vocab_size: int = key("size of the vocabulary", 8192, unit="tokens", minimum=512)
    hidden_size: int = key("size of hidden states", 128, unit="numbers", minimum=2)
    num_hidden_layers: int = key("layers", 4, unit="layers", minimum=1)
    num_attention_heads: int = key("heads of a layer", 2, unit="heads", minimum=1)
    intermediate_size: int = key("size between the products of a feed-forward layer", 256, unit="numbers", minimum=1)
    local_attention: int = key("window of local attention, both sides together", 128, unit="tokens", minimum=2)
    global_attn_every_n_layers: int = key("every so many layers attend to all tokens", 3, unit="layers", minimum=1)
    dropout: float = key("of all its dropouts", 0.0, unit="probability", minimum=0, maximum=1)


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters; the names are those of ``peft.LoraConfig``. ``target_modules`` is a regular expression."""

    target_modules: str = key("regular expression of the modules that get adapters")
    r: int = key("rank", 32, unit="numbers", minimum=1)
    lora_alpha: int = key("adapters are multiplied by this over `r`", 32, minimum=1)
    lora_dropout: float = key("dropout before adapters", 0.1, unit="probability", minimum=0, maximum=1)
    init_lora_weights: Literal["gaussian", "default"] = key("initial weights", "gaussian")


@dataclass(frozen=True)
class TextModelSection(ModelSection):
    """A text encoder: ``name_or_path``, or ``build`` for one made from scratch."""

    build: BuildSection | None = key("make a small ModernBERT from scratch, in place of `name_or_path`", None)
    config_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "values of the encoder's configuration, for example its dropouts"}
    )
    trust_remote_code: bool = key("run code that comes with a checkpoint", False)


@dataclass(frozen=True)
class LateModelSection(TextModelSection):
    """A text encoder with late interaction. null keeps the value of the checkpoint."""

    embedding_size: int | None = key(
        "size of token embeddings, of encoders without a projection", None, unit="numbers", minimum=1
    )
    query_length: int | None = key("largest query; of expanded queries all", None, unit="tokens", minimum=3)
    document_length: int | None = key("largest document", None, unit="tokens", minimum=3)
    do_query_expansion: bool | None = key("fill queries up to `query_length` with mask tokens", None)
    attend_to_expansion_tokens: bool | None = key("attend to these mask tokens", None)

    length = "document_length"


@dataclass(frozen=True)
class ColBERTSection(LateModelSection):
    """A text encoder trained with PyLate: ``name_or_path``, ``build`` for one made from scratch, or ``token_table``.

    null keeps the value of the checkpoint.

    A ``token_table`` makes a ColBERT whose encoder is a table: each token of the vocabulary has one vector, at first that
    which the named model gives it in a text of this token alone. A text is its own tokens, without special tokens and
    prefixes. Lengths that are null are those of the named model.
    """

    kind: Literal["colbert"] = key("late interaction of PyLate", "colbert")
    token_table: str | None = key("ColBERT of which a table of token vectors is made", None, on_hub="a model")


@dataclass(frozen=True)
class MultiVectorSection(LateModelSection):
    """A MultiVectorEncoder of Sentence Transformers 6, saved by it or by PyLate, or made of an encoder.

    An ``embedding_size`` of null is 128.
    """

    kind: Literal["multi_vector"] = key("late interaction of Sentence Transformers 6", "multi_vector")
    attn_implementation: str | None = key("attention of transformers", None)


@dataclass(frozen=True)
class SpladeSection(TextModelSection):
    """A SparseEncoder of Sentence Transformers, saved by it or made of a masked language model."""

    kind: Literal["splade"] = key("sparse vectors of Sentence Transformers", "splade")
    max_seq_length: int | None = key("largest text; null: that of the checkpoint", None, unit="tokens", minimum=3)
    inference_free: bool = key("queries have a weight for each token of the vocabulary in place of the encoder", False)

    length = "max_seq_length"


@dataclass(frozen=True)
class PagesSection(ModelSection):
    """A model that retrieves images of pages, trained with colpali-engine (the extra [colpali])."""

    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "dtype of the weights; auto: bfloat16 for adapters on a GPU that has it, else float32", "auto"
    )
    attn_implementation: str | None = key("attention of transformers", None)
    lora: LoraSection | None = key("train adapters only; null: all weights", None)

    visual = True


@dataclass(frozen=True)
class ColPaliSection(PagesSection):
    """A ColPali, whose pages all have one size."""

    kind: Literal["colpali"] = key("pages of one size", "colpali")


@dataclass(frozen=True)
class ColQwen2Section(PagesSection):
    """A ColQwen2."""

    kind: Literal["colqwen2"] = key("pages of any size", "colqwen2")
    max_visual_tokens: int | None = key("largest page", None, unit="tokens", minimum=1)

    length = "max_visual_tokens"


@dataclass(frozen=True)
class ColBERTLoss(LossSection):
    """A loss of PyLate; null keeps its default."""

    name: TextLoss = key(_NAME, "contrastive")
    temperature: float | None = key(_SCALE, None, above=0, only=CONTRASTIVE)
    size_average: bool | None = key("mean over the queries, not the sum", None)
    mini_batch_size: int | None = key(_MINI_BATCH, None, unit="texts", minimum=1, only=CACHED)
    score_mini_batch_size: int | None = key(_SCORED, None, unit="queries", minimum=1, only=CONTRASTIVE)
    gather_across_devices: bool | None = key(_GATHER, None, only=CONTRASTIVE)
    normalize_scores: bool | None = key("scale the model's scores of a query to [0, 1]", None, only=DISTILLATION)
    pooling: PoolingSection | None = key(_POOLING, None, null="max")
    pool_factors: list[float] | None = key(_POOL_FACTORS, None, minimum=1)
    pool_weights: list[float] | None = key(_POOL_WEIGHTS, None, minimum=0)


@dataclass(frozen=True)
class MultiVectorLoss(LossSection):
    """A loss of late interaction of Sentence Transformers. A ``temperature`` of null is 1, an ``objective`` the KL divergence."""

    name: TextLoss = key(_NAME, "contrastive")
    temperature: float | None = key(_SCALE, None, above=0)
    mini_batch_size: int | None = key(_MINI_BATCH, None, unit="texts", minimum=1)
    mini_batch_num_tokens: int | None = key("the same by tokens", None, unit="tokens", minimum=1, only=CACHED)
    score_mini_batch_size: int | None = key(_SCORED, None, unit="queries", minimum=1, only=CONTRASTIVE)
    gather_across_devices: bool | None = key(_GATHER, None, only=CONTRASTIVE)
    pooling: PoolingSection | None = key(_POOLING, None, null="max")
    pool_factors: list[float] | None = key(_POOL_FACTORS, None, minimum=1)
    pool_weights: list[float] | None = key(_POOL_WEIGHTS, None, minimum=0)
    objective: Objective | None = key(_OBJECTIVE, None, only=DISTILLATION)


@dataclass(frozen=True)
class RegularizersSection:
    """The regularizers that make the vectors of a SPLADE sparse, those of Sentence Transformers' ``SpladeLoss``.

    ``flops`` is the sum over the vocabulary of the squared mean weight in a batch, ``l1`` the mean sum of a vector's
    weights. A side without a weight has none.
    """

    document_weight: float = key("weight of the documents' regularizer", minimum=0)
    query_weight: float | None = key("weight of the queries' regularizer", None, minimum=0)
    document: Literal["flops", "l1"] = key("regularizer of documents", "flops")
    query: Literal["flops", "l1"] = key("regularizer of queries", "flops")
    document_threshold: int | None = key(_THRESHOLD, None, unit="terms", minimum=0)
    query_threshold: int | None = key(_THRESHOLD, None, unit="terms", minimum=0)
    schedule: Literal["linear", "quadratic"] = key("how the weights rise from 0", "quadratic")
    warmup_ratio: float = key("part of the training in which they rise", 1 / 3, unit="share", above=0, maximum=1)


@dataclass(frozen=True)
class SpladeLoss(LossSection):
    """Sentence Transformers' ``SpladeLoss`` with ``regularizers``.

    It is ``CachedSpladeLoss`` for ``cached_contrastive`` and for distillation with a ``mini_batch_size``. A ``temperature``
    of null is 1, or 2 for the KL divergence, which is the ``objective`` of null.
    """

    name: TextLoss = key(_NAME, "contrastive")
    temperature: float | None = key(_SCALE, None, above=0)
    mini_batch_size: int | None = key(_MINI_BATCH, None, unit="texts", minimum=1, only=CACHED + DISTILLATION)
    gather_across_devices: bool | None = key(_GATHER, None, only=CONTRASTIVE)
    objective: Objective | None = key(_OBJECTIVE, None, only=DISTILLATION)
    regularizers: RegularizersSection | None = key("what makes vectors sparse", None)


WITH_NEGATIVES = ("colbert_negative_ce", "colbert_pairwise_negative_ce")


@dataclass(frozen=True)
class PagesLoss(LossSection):
    """A loss of colpali-engine: ``colbert_pairwise_ce`` is its ``ColbertPairwiseCELoss``, and so on."""

    name: Literal[
        "colbert", "colbert_pairwise_ce", "colbert_sigmoid", "colbert_negative_ce", "colbert_pairwise_negative_ce"
    ] = key("loss, by its name in colpali-engine", "colbert")
    temperature: float | None = key(_SCALE, None, above=0)
    normalize_scores: bool | None = key("divide scores by the number of query tokens", None)
    use_smooth_max: bool | None = key("log-sum-exp in place of the maximum", None)
    tau: float | None = key("temperature of the smooth maximum", None, unit="similarity", above=0)
    pos_aware_negative_filtering: bool | None = key("weaken negatives that score nearly as high as the positive", None)
    filter_threshold: float | None = key(
        "share of the positive's score from which they are weakened", None, unit="share"
    )
    filter_factor: float | None = key("factor of their scores", None)
    in_batch_term_weight: float | None = key(
        "weight of the in-batch term beside explicit negatives", None, minimum=0, maximum=1, only=WITH_NEGATIVES
    )
    norm_tol: float | None = key("how far normalised scores may exceed their range", None, minimum=0)
    max_batch_size: int | None = key("largest batch, for which indices are prepared", None, unit="rows", minimum=1)


@dataclass(frozen=True)
class PagesTraining(TrainingSection):
    """Training of a model of pages."""

    log_gradient_concentration: int | None = key(_CONCENTRATION, None, unit="steps", minimum=1)


@dataclass(frozen=True)
class TextTraining(TrainingSection):
    """Training of a model of texts."""

    batch_sampler: Literal["batch_sampler", "no_duplicates"] = key(
        "sampler of Sentence Transformers; no_duplicates: no text twice in a batch", "batch_sampler"
    )


@dataclass(frozen=True)
class LateTraining(TextTraining):
    """Training of a model of late interaction."""

    log_gradient_concentration: int | None = key(_CONCENTRATION, None, unit="steps", minimum=1)


@dataclass(frozen=True)
class SpladeTraining(TextTraining):
    """Training of a sparse encoder."""

    query_learning_rate: float | None = key(
        "learning rate of the query weights of an inference-free model; null: `learning_rate`", None, minimum=0
    )


def _fast_section(name: str, host: str) -> type[FastSection]:
    """The section ``fast`` of the kinds that a host trains; the option ``pooling`` is ``loss.pooling``."""
    switches = [option for option in OPTIONS if isinstance(option.default, bool) and host in option.metadata["hosts"]]
    keys = [
        (option.name, bool, key(option.metadata["meaning"].partition(". ")[0], option.default)) for option in switches
    ]
    return make_dataclass(name, keys, bases=(FastSection,), namespace={"__module__": __name__}, frozen=True)


PyLateFast = _fast_section("PyLateFast", PYLATE)
SentenceTransformersFast = _fast_section("SentenceTransformersFast", SENTENCE_TRANSFORMERS)


def _recipe(model: type[ModelSection], mining: bool = False, **sections: type) -> type[Recipe]:
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
