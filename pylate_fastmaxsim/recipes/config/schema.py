"""The keys of a recipe: their names, types, defaults and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

# NumPy's largest seed; the trainer seeds NumPy too.
LARGEST_SEED = 2**32 - 1


def key(
    meaning: str,
    default: Any = MISSING,
    *,
    unit: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    path: bool = False,
    on_hub: str | None = None,
    null: str | None = None,
    only: tuple[str, ...] | None = None,
    required: bool = False,
) -> Any:
    """A key of a section, with its ``meaning`` for docs/reference.md; a number counts in ``unit``.

    ``path``: in it ``~`` is the home directory. ``on_hub``: of a path that may also be a name on the Hub, what has that
    name. ``null``: a word for null. ``only``: the values of the section's ``SELECTOR`` that take the key, None for all, and
    whether they need it (``required``).
    """
    limits = {"minimum": minimum, "maximum": maximum, "above": above}
    places = {"path": path or on_hub is not None, "on_hub": on_hub}
    selected = {"null": null, "only": only, "required": required}
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "limits": limits, **places, **selected})


@dataclass(frozen=True)
class ModelSection:
    """The model. Each kind has a section of its own, with its own keys."""

    kind: str
    name_or_path: str | None = key("the model, by its name on the Hub or its folder", None, on_hub="a model")

    # What only some kinds have as a key, as those without it are.
    visual = False  # whether the documents are images
    inference_free = False
    trust_remote_code = False
    dtype = "auto"
    build = token_table = None
    config_kwargs: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    length = None  # the key of the largest number of tokens of a document

    def loaded_from(self, folder: str) -> ModelSection:
        """This section for the model that was made from it in a folder."""
        made = {field.name: None for field in fields(self) if field.name in ("build", "token_table")}
        return replace(self, name_or_path=folder, **made)


_ROWS = ("hub", "files")
_ON_HUB = ("hub", "distillation")


@dataclass(frozen=True)
class RowsSection:
    """Rows of texts, on the Hub or in files of the types that :class:`DataSection` names."""

    SELECTOR: ClassVar = "source"

    source: Literal["hub", "files"] = key("where the rows come from: `hub` takes `name`, `files` takes `files`")
    name: str | None = key("data set on the Hub, or a folder", None, on_hub="data", only=_ON_HUB, required=True)
    config: str | None = key("configuration (subset) of it", None, only=("hub",))
    split: str | None = key("split of it", None, only=_ON_HUB)
    files: list[str] | None = key("local files", None, path=True, only=("files",), required=True)
    columns: list[str] | None = key("columns to use, in their order: query, positive, negatives; null: all", None)
    max_rows: int | None = key("keep a random part of so many", None, unit="rows", minimum=2)
    seed: int = key("seed of all that is drawn of the data", 0, minimum=0)

    # What only rows to train on have as a key, and pairs to mine the text_key.
    packages = queries = collection = text_key = negatives = negatives_per_query = n_ways = more = None
    streaming = False


@dataclass(frozen=True)
class PairsSection(RowsSection):
    """Rows of a query and its positive, which may be a passage with a ``text_key``."""

    text_key: str | None = key("key of the text of a passage, beside the usual ones", None)


@dataclass(frozen=True)
class DataSection(RowsSection):
    """Rows to train on.

    Files are .parquet, .jsonl, .json, .csv or .tsv, all but the first perhaps with .gz behind it. Of .csv and .tsv
    everything is text. A .tsv has no quotes, and may have no line of column names, as that of MS MARCO
    (docs/recipes.md#data, also for the columns by their names).

    The positive may be a list, each of which becomes a row, and negatives may be lists or columns of one each. A text may be
    a passage, with ``title`` and a key for the text: text, body, content, contents, passage, passage_text or ``text_key``.
    Files of ids may be ColBERT's JSON lines: [qid, pid+, pid-, ...], or [qid, [pid, score], ...] for distillation; or
    judgements, with BEIR's columns (query-id, corpus-id, score) or .tsv in TREC's layout (qid 0 docid grade): each document
    with a grade above 0 is a positive.

    For distillation the columns are the query, a list of documents and a list of teacher scores. For retrieval of pages they
    are the query, the image of its page and, for losses with negatives, a list of images of other pages.

    ``source: distillation`` has the layout of ``lightonai/ms-marco-en-bge``: the subsets ``train`` (query_id, document_ids,
    scores), ``queries`` (query_id, text) and ``documents`` (document_id, text), on the Hub, in a copy of it, or in a folder
    with train, queries and documents as files of one of these types. An id stands for one text.

    With ``streaming`` rows are shuffled within a buffer of 10,000, and come again in the same order after the last.
    """

    source: Literal["docstrings", "hub", "files", "distillation"] = key(
        "docstrings of installed `packages`, a data set on the `hub`, local `files`, or the subsets of a `distillation`"
    )
    columns: list[str] | None = key(
        "columns to use, in their order: query, positive, negatives; null: all, by their names",
        None,
        only=("docstrings", *_ROWS),
    )
    packages: list[str] | None = key(
        "installed packages whose docstrings are pairs", None, only=("docstrings",), required=True
    )
    queries: str | None = key("file of queries, whose ids stand in the rows", None, path=True, only=_ROWS)
    collection: str | None = key("file of documents, whose ids stand in the rows", None, path=True, only=_ROWS)
    text_key: str | None = key(
        "key of the text of a passage or of `collection`, beside the usual ones", None, only=_ROWS
    )
    negatives: list[str] | None = key("systems whose negatives are used; null: all", None, only=_ROWS)
    negatives_per_query: int | None = key(
        "negatives of each row, drawn of more, repeated of fewer; null: all",
        None,
        unit="negatives",
        minimum=1,
        only=_ROWS,
    )
    n_ways: int | None = key(
        "first documents of each row of a distillation; null: of ids as many as the shortest row has, of texts all",
        None,
        unit="documents",
        minimum=2,
        only=(*_ROWS, "distillation"),
    )
    streaming: bool = key("read rows while training; needs `training.max_steps`", False)
    more: list[DataSection] | None = key("more data sets, whose rows are mixed with these", None)


# How the embeddings of documents may be compressed: int8, fp8, and PLAID's residual codes of 1, 2 or 4 bits a number.
CompressedFormat = Literal["int8", "fp8", "residual-1", "residual-2", "residual-4"]


@dataclass(frozen=True)
class FirstStageSection:
    """A search for the ``k`` candidates of each query, of which alone mining computes late-interaction scores.

    It is an exact search of sparse vectors. A document that shares no term with a query is no candidate.
    """

    SELECTOR: ClassVar = "kind"

    kind: Literal["sparse", "static", "bm25"] = key(
        "vectors of a SparseEncoder, of a StaticLateInteraction, or BM25 on the tokens of the recipe's model"
    )
    k: int = key("candidates of each query", 1000, unit="documents", minimum=1)
    model: str | None = key(
        "the sparse or static model", None, on_hub="a model", only=("sparse", "static"), required=True
    )
    threshold: float | None = key(
        "threshold of the static model; null: its own", None, unit="similarity", only=("static",)
    )
    k1: float = key("saturation of term frequencies", 1.5, minimum=0, only=("bm25",))
    b: float = key("normalisation by document length", 0.75, minimum=0, maximum=1, only=("bm25",))


@dataclass(frozen=True)
class MiningSection:
    """Hard negatives for distillation, which ``fastmaxsim mine`` writes to ``data.name``.

    Negatives are found among all positives and the texts of ``corpus``. Equal texts are one document, so that no positive of
    a query is taken for its negative. Texts are read from disk as they are needed. Negatives are chosen as
    ``sentence_transformers.util.mine_hard_negatives`` does: of each query's best documents (``range_max`` plus the largest
    number of positives of a query) positives and those that the margins and limits rule out as likely false negatives are
    dropped, and of the first ``range_max`` that are left the first ``range_min`` are skipped.

    With a ``corpus_format`` all scores of the search are those of compressed documents; those of the teacher are not. Parts
    are also what the processes of a distributed launcher share, so that there should be more of them than processes.
    """

    pairs: PairsSection = key("rows of a query and its positive")
    teacher: str = key("model that scores the positive and its negatives", on_hub="a model")
    corpus: RowsSection | None = key("more texts to find negatives in: rows of one column", None)
    teacher_type: Literal["cross_encoder", "colbert"] = key(
        "scores as they are, or of late interaction, scaled to [0, 1] for each query", "cross_encoder"
    )
    first_stage: FirstStageSection | None = key("search that finds the candidates of each query; null: none", None)
    corpus_format: CompressedFormat | None = key("compress documents as they are encoded; null: as they are", None)
    pool_factor: float = key("pool so many tokens of a document into one vector", 1, unit="tokens", minimum=1)
    num_negatives: int = key(
        "negatives of each pair; a pair that has fewer is left out", 15, unit="documents", minimum=1
    )
    range_min: int = key("best documents to skip", 0, unit="documents", minimum=0)
    range_max: int = key("best documents to take negatives from", 100, unit="documents", minimum=1)
    absolute_margin: float | None = key("how far below the positive a negative must score", None, unit="score")
    relative_margin: float | None = key("the same as a share of the positive's score", None, unit="share")
    max_score: float | None = key("highest score of a negative", None, unit="score")
    min_score: float | None = key("lowest score of a negative", None, unit="score")
    batch_size: int = key("texts encoded at once", 64, unit="texts", minimum=1)
    documents_per_part: int = key("documents that an interruption can cost", 50_000, unit="documents", minimum=1)
    rows_per_part: int = key("rows that an interruption can cost", 2_000, unit="rows", minimum=1)


_TEMPERATURE = {"minimum": 1e-30, "maximum": 1e30}
# The poolings that a recipe may name.
POOLING_KEYS = ("top_k", "softmax", "log_sum_exp")


@dataclass(frozen=True)
class PoolingSection:
    """Pooling of a query token's similarities to a document's tokens in place of their maximum, one of three.

    See :func:`pylate_fastmaxsim.pooled_scores`. Evaluation uses the value at the end of a schedule.
    """

    top_k: int | None = key("mean of the k largest", None, unit="tokens", minimum=1)
    softmax: float | None = key(
        "mean weighted by a softmax of this temperature", None, unit="similarity", **_TEMPERATURE
    )
    log_sum_exp: float | None = key("log-sum-exp of this temperature", None, unit="similarity", **_TEMPERATURE)
    start: float | None = key(
        "value in the first step of a schedule; in the last it is that of the pooling", None, **_TEMPERATURE
    )
    schedule: Literal["linear", "cosine"] | None = key(
        "how the value changes: in equal steps, or along half a cosine", None
    )

    @property
    def name(self) -> str:
        """The key of the pooling."""
        return next(name for name in POOLING_KEYS if getattr(self, name) is not None)


@dataclass(frozen=True)
class LossSection:
    """A loss of the library that trains a kind of model. null keeps the default of an option."""

    SELECTOR: ClassVar = "name"

    name: str

    # What only some kinds have as a key.
    temperature = mini_batch_size = mini_batch_num_tokens = score_mini_batch_size = pooling = objective = None
    pool_factors = pool_weights = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a loss of PyLate or colpali-engine that are not null, under its own names."""
        ours = "name", "pooling", "pool_factors", "pool_weights"
        return {name: value for name, value in asdict(self).items() if name not in ours and value is not None}


@dataclass(frozen=True)
class TrainingSection:
    """Arguments of the trainer of the library that trains the model, under their own names.

    These have a default, a limit or a meaning of recipes. Any other one may be given as well, as ``warmup_ratio``, ``tf32``
    or ``push_to_hub``; it is checked against the library's dataclass. A run goes on with as many processes as it began with.
    """

    per_device_train_batch_size: int = key("batch of each process", 32, unit="rows", minimum=1)
    gradient_accumulation_steps: int = key("batches of an optimizer step", 1, unit="batches", minimum=1)
    num_train_epochs: float = key("passes over the data", 1.0, unit="epochs", minimum=0)
    max_steps: int | None = key("optimizer steps, in place of epochs", None, unit="steps", minimum=1)
    learning_rate: float = key("peak learning rate", 3e-6, minimum=0)
    lr_scheduler_type: str = key("schedule of the learning rate, by its name in transformers", "linear")
    warmup_steps: int = key("steps in which the learning rate rises", 0, unit="steps", minimum=0)
    weight_decay: float = key("weight decay of AdamW", 0.0, minimum=0)
    adam_epsilon: float = key("epsilon of AdamW", 1e-8, minimum=0)
    max_grad_norm: float = key("norm to which gradients are clipped; 0: not clipped", 1.0, minimum=0)
    optim: str = key("optimizer, by its name in transformers", "adamw_torch")
    seed: int = key("seed of weights, data order and dropout", 42, minimum=0, maximum=LARGEST_SEED)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "autocast; auto: bf16 where the GPU has it, else fp16, and fp32 on a CPU", "auto"
    )
    gradient_checkpointing: bool = key("compute layers again in the backward: less memory, more time", False)
    dataloader_drop_last: bool = key("leave out a last batch that is not full", False)
    dataloader_num_workers: int = key("processes that load data", 0, unit="processes", minimum=0)
    logging_steps: int = key("log every so many", 10, unit="steps", minimum=1)
    save_steps: int | None = key("save a checkpoint every so many; null: none", 500, unit="steps", minimum=1)
    save_total_limit: int | None = key("checkpoints that are kept; null: all", 2, unit="checkpoints", minimum=1)
    report_to: str | list[str] = key("where the trainer logs to; auto: TensorBoard, W&B", "auto")
    early_stopping_patience: int | None = key(
        "stop after so many evaluations that are not the best",
        None,
        unit="evaluations",
        minimum=1,
    )
    use_cpu: bool = key("train on the CPU", False)
    # Of the trainer, under their own names: what is no key of its own.
    arguments: dict[str, Any] = field(default_factory=dict, metadata={"others": True})

    # What only some kinds have as a key.
    batch_sampler = "batch_sampler"
    query_learning_rate = log_gradient_concentration = None

    @property
    def needs_best(self) -> list[str]:
        """The keys by which a training needs the best of its evaluations."""
        needing = {
            "early_stopping_patience": self.early_stopping_patience is not None,
            "load_best_model_at_end": self.arguments.get("load_best_model_at_end"),
            "save_strategy": self.arguments.get("save_strategy") == "best",
            "lr_scheduler_type": self.lr_scheduler_type == "reduce_lr_on_plateau",
        }
        return [key for key, needed in needing.items() if needed]


@dataclass(frozen=True)
class FastSection:
    """The switch of pylate-fastmaxsim, and the options of ``pylate_fastmaxsim.enable`` that concern the kind."""

    enabled: bool = key("train with this package, or with the stock library", True)

    stock_masking = False  # of PyLate's losses only


@dataclass(frozen=True)
class EvaluationSection:
    """Retrieval by exact search, at the end and, with ``training.eval_strategy``, in the training.

    All rows of a query are held out together, so that no query is both trained on and evaluated. Where queries stand in
    several rows, somewhat more rows than asked for are held out.
    """

    rows: int = key("held out of training: nDCG@10 over their documents or pages", 0, unit="rows", minimum=0)
    data: DataSection | None = key("validation rows, in place of rows held out", None)
    batch_size: int = key("texts or pages encoded at once", 32, unit="texts", minimum=1)

    # What only some kinds have as a key.
    beir = nano_beir = corpus_format = None
    split, pool_factor = "test", 1

    @property
    def has_rows(self) -> bool:
        """Tell whether rows are evaluated on, which takes seconds."""
        return self.rows > 0 or self.data is not None


@dataclass(frozen=True)
class TextEvaluationSection(EvaluationSection):
    """Retrieval of texts by exact search, of one of four kinds or of none.

    Of rows with a column of negatives also the accuracy of triplets is measured (how often the positive scores higher
    than the first negative), and for distillation the KL divergence from the teacher's scores, as the library that trains
    the model computes it. A folder for ``beir`` has corpus and queries as .jsonl or .parquet files, and ``qrels/SPLIT.tsv``
    or ``qrels.tsv`` in BEIR's layout or TREC's. Of sparse vectors all three have FLOPS and the mean non-zeros of queries and
    documents beside them (docs/recipes.md).
    """

    beir: str | None = key(
        "collection in BEIR's layout: nDCG@10, MRR@10 and Recall@100 over its corpus", None, on_hub="a collection"
    )
    split: str = key("split of its judgements", "test")
    nano_beir: list[str] | None = key(
        "sets of NanoBEIR, as msmarco and nq: the same metrics, each the mean over the sets", None
    )


@dataclass(frozen=True)
class LateEvaluationSection(TextEvaluationSection):
    """Retrieval of texts by late interaction."""

    corpus_format: CompressedFormat | None = key("compress the documents of `beir` as they are encoded", None)
    pool_factor: float = key("pool so many tokens of a document into one vector", 1, unit="tokens", minimum=1)


@dataclass(frozen=True)
class Recipe:
    """One training run. Relative paths are relative to the working directory, and ``~`` is the home directory.

    Which keys the sections have depends on ``model.kind``: :data:`pylate_fastmaxsim.recipes.config.kinds.RECIPES`.
    """

    name: str = key("name of the run, in cards, tables and logs")
    output_dir: str = key("folder of checkpoints, results and the model", path=True)
    model: ModelSection
    data: DataSection
    loss: LossSection
    training: TrainingSection
    fast: FastSection
    evaluation: EvaluationSection

    mining = None  # of what only some kinds have
