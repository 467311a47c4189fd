"""The keys of a recipe: their names, types, defaults and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

# NumPy's largest seed; the trainer seeds NumPy too.
LARGEST_SEED = 2**32 - 1


def key(
    default: Any = MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    path: bool = False,
    on_hub: str | None = None,
    null: str | None = None,
    only: tuple[str, ...] | None = None,
    required: bool = False,
) -> Any:
    """A key of a section.

    Parameters
    ----------
    default
        Its value where it is left out.
    minimum, maximum, above
        Its limits; ``above`` is one that it must exceed.
    path
        Whether it is a path, in which ``~`` is the home directory.
    on_hub
        Of a path that may also be a name on the Hub, what has that name.
    null
        A word for null.
    only
        Values of the section's ``SELECTOR`` that take it, None for all, and whether they need it (``required``).
    """
    limits = {"minimum": minimum, "maximum": maximum, "above": above}
    places = {"path": path or on_hub is not None, "on_hub": on_hub}
    return field(
        default=default, metadata={"limits": limits, **places, "null": null, "only": only, "required": required}
    )


@dataclass(frozen=True)
class ModelSection:
    """The model: ``name_or_path`` on the Hub or on disk. Each kind has a section of its own, with its own keys."""

    kind: str
    name_or_path: str | None = key(None, on_hub="a model")

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
    """Rows of texts: ``hub`` loads ``name``, ``config`` and ``split``, ``files`` local ``files``, as in :class:`DataSection`."""

    SELECTOR: ClassVar = "source"

    source: Literal["hub", "files"]
    name: str | None = key(None, on_hub="data", only=_ON_HUB, required=True)
    config: str | None = key(None, only=("hub",))
    split: str | None = key(None, only=_ON_HUB)
    files: list[str] | None = key(None, path=True, only=("files",), required=True)
    columns: list[str] | None = None
    max_rows: int | None = key(None, minimum=2)
    seed: int = key(0, minimum=0)

    # What only rows to train on have as a key, and pairs to mine the text_key.
    packages = queries = collection = text_key = negatives = negatives_per_query = n_ways = None
    streaming = False


@dataclass(frozen=True)
class PairsSection(RowsSection):
    """Rows of a query and its positive, which may be a passage with a ``text_key``."""

    text_key: str | None = None


@dataclass(frozen=True)
class DataSection(RowsSection):
    """Rows to train on.

    ``source: docstrings`` makes (query, positive) pairs from the installed ``packages``; ``hub`` loads
    ``name``, ``config`` and ``split`` with ``datasets.load_dataset``; ``files`` loads local ``files``: .parquet, .jsonl,
    .json, .csv or .tsv, all but the first perhaps with .gz behind it. Of .csv and .tsv everything is text. A .tsv has no
    quotes, and may have no line of column names, as that of MS MARCO (docs/recipes.md#data).

    ``columns`` lists the columns to use in order: the query, its positive and any negatives. Without it all are used, in
    the order of the data, except ``dataset_name`` and those with ``_id`` in their name, which PyLate's collator leaves
    out; those behind the positive must then be named as negatives (negative, neg_1, hard_negative, ...). Behind the first
    column none may have query or anchor in its name, by which the collator recognises queries. For
    ``model.kind: splade`` such names are free, but not label, score and others that Sentence Transformers reads as scores.

    The positive may be a list, each of which becomes a row, and negatives may be lists or columns of one each.
    ``negatives_per_query`` is how many negatives of each row are used: more are drawn with ``seed``, fewer are repeated.
    Null uses all, and every row must have as many. Where negatives are lists by the systems that found them, ``negatives``
    names the systems to use; null uses all. A text may be a passage, with ``title`` and a key for the text: text, body,
    content, contents, passage, passage_text or ``text_key``, which is also that of a collection.

    With a ``collection`` documents are ids, of the documents in this file, and with ``queries`` queries are ids too. Both
    are .tsv files of id, text and perhaps title, or files of another type with these columns (_id, text, title). Files of
    ids may then be ColBERT's JSON lines as well: [qid, pid+, pid-, ...], or [qid, [pid, score], ...] for distillation.
    They may also be judgements, with BEIR's columns (query-id, corpus-id, score) or .tsv in TREC's layout (qid 0 docid
    grade): each document with a grade above 0 is a positive.

    For distillation the columns are the query, a list of documents and
    a list of teacher scores. For retrieval of pages they are the query, the image of its page and, for losses with
    negatives, a list of images of other pages.

    ``source: distillation`` loads ``name`` in the layout of ``lightonai/ms-marco-en-bge``: the subsets
    ``train`` (query_id, document_ids, scores), ``queries`` (query_id, text) and ``documents``
    (document_id, text), on the Hub, in a copy of it, or in a folder with train, queries and documents
    as files of one of these types. An id stands for one text. Texts are read from disk as they are needed.
    ``n_ways`` is how many documents of each row of a distillation are used, the first ones. Null uses as many as the
    shortest row has of ids; of texts all are used, and every row must have as many.

    ``max_rows`` keeps a random part, drawn with ``seed``.

    With ``streaming`` rows of ``hub`` and ``files`` are read while training, and nothing is copied to the disk. They are
    shuffled within a buffer of 10,000 rows, and come again in the same order after the last. ``training.max_steps`` says
    when training ends.
    """

    source: Literal["docstrings", "hub", "files", "distillation"]
    columns: list[str] | None = key(None, only=("docstrings", *_ROWS))
    packages: list[str] | None = key(None, only=("docstrings",), required=True)
    queries: str | None = key(None, path=True, only=_ROWS)
    collection: str | None = key(None, path=True, only=_ROWS)
    text_key: str | None = key(None, only=_ROWS)
    negatives: list[str] | None = key(None, only=_ROWS)
    negatives_per_query: int | None = key(None, minimum=1, only=_ROWS)
    n_ways: int | None = key(None, minimum=2, only=(*_ROWS, "distillation"))
    streaming: bool = False


# How the embeddings of documents may be compressed: int8, fp8, and PLAID's residual codes of 1, 2 or 4 bits a number.
CompressedFormat = Literal["int8", "fp8", "residual-1", "residual-2", "residual-4"]


@dataclass(frozen=True)
class FirstStageSection:
    """A search for the ``k`` candidates of each query, of which alone mining computes late-interaction scores.

    It is an exact search of sparse vectors. ``kind: sparse`` takes those of ``model``, a SparseEncoder of Sentence
    Transformers; ``static`` those of a StaticLateInteraction in the folder ``model``, at its own threshold or at
    ``threshold``; ``bm25`` takes the tokens of the recipe's model, weighted by BM25 with ``k1`` and ``b``. A document
    that shares no term with a query is no candidate.
    """

    SELECTOR: ClassVar = "kind"

    kind: Literal["sparse", "static", "bm25"]
    k: int = key(1000, minimum=1)
    model: str | None = key(None, on_hub="a model", only=("sparse", "static"), required=True)
    threshold: float | None = key(None, only=("static",))
    k1: float = key(1.5, minimum=0, only=("bm25",))
    b: float = key(0.75, minimum=0, maximum=1, only=("bm25",))


@dataclass(frozen=True)
class MiningSection:
    """Hard negatives for distillation, which ``fastmaxsim mine`` writes to ``data.name``.

    ``pairs`` are rows of a query and its positive (``source: hub`` or ``files``). Negatives are found among all
    positives and, where given, the texts of ``corpus``, likewise with one column. Equal texts are one document, so that
    no positive of a query is taken for its negative. Texts are read from disk as they are needed. The model of the
    recipe searches them, and negatives are chosen as ``sentence_transformers.util.mine_hard_negatives`` does. It takes
    each query's best documents (``range_max`` plus the largest number of positives of a query), drops its positives and
    those that the margins and limits rule out as likely false negatives, and keeps the first ``range_max`` that are
    left. Of these it skips the first ``range_min`` and takes the next ``num_negatives``. A pair that has fewer is left
    out. ``teacher``, on the Hub or on disk, scores the positive and its negatives: a
    ``cross_encoder`` as it is, or a ``colbert`` scaled to [0, 1] for each query.

    With a ``first_stage`` the best documents are the best of its candidates.

    With a ``corpus_format`` documents are compressed as they are encoded, and all scores of the search are those of
    compressed documents; those of the teacher are not.

    ``documents_per_part`` and ``rows_per_part`` are how much work an interruption can cost at most. Parts are also what
    the processes of a distributed launcher share, so that there should be more of them than processes.
    """

    pairs: PairsSection
    teacher: str = key(on_hub="a model")
    corpus: RowsSection | None = None
    teacher_type: Literal["cross_encoder", "colbert"] = "cross_encoder"
    first_stage: FirstStageSection | None = None
    corpus_format: CompressedFormat | None = None
    num_negatives: int = key(15, minimum=1)
    range_min: int = key(0, minimum=0)
    range_max: int = key(100, minimum=1)
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    batch_size: int = key(64, minimum=1)
    documents_per_part: int = key(50_000, minimum=1)
    rows_per_part: int = key(2_000, minimum=1)


# The poolings that a recipe may name.
POOLING_KEYS = ("top_k", "softmax", "log_sum_exp")


@dataclass(frozen=True)
class PoolingSection:
    """Pooling of a query token's similarities to a document's tokens in place of their maximum, one of three.

    ``top_k`` is the k of ``TopK``, ``softmax`` and ``log_sum_exp`` are the temperatures of ``Softmax`` and
    ``LogSumExp``; see :func:`pylate_fastmaxsim.pooled_scores`. The value changes over the training if there is a
    ``schedule``: from ``start`` in the first step to the one named by the pooling in the last, in equal steps or along
    half a cosine. k is rounded. Evaluation uses the value at the end.
    """

    top_k: int | None = key(None, minimum=1)
    softmax: float | None = key(None, minimum=1e-30, maximum=1e30)
    log_sum_exp: float | None = key(None, minimum=1e-30, maximum=1e30)
    start: float | None = key(None, minimum=1e-30, maximum=1e30)
    schedule: Literal["linear", "cosine"] | None = None

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

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a loss of PyLate or colpali-engine that are not null, under its own names."""
        own = {name: value for name, value in asdict(self).items() if name not in ("name", "pooling")}
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class TrainingSection:
    """Arguments of ``SentenceTransformerTrainingArguments``, under their own names.

    ``precision: auto`` means bf16 where the GPU has it, else fp16, and fp32 on a CPU. ``max_steps``,
    where given, overrides ``num_train_epochs``. ``save_steps`` is how much work an interruption can
    cost at most; null saves no checkpoint. A run goes on with as many processes as it began with.
    """

    per_device_train_batch_size: int = key(32, minimum=1)
    gradient_accumulation_steps: int = key(1, minimum=1)
    num_train_epochs: float = key(1.0, minimum=0)
    max_steps: int | None = key(None, minimum=1)
    learning_rate: float = key(3e-6, minimum=0)
    lr_scheduler_type: str = "linear"
    warmup_steps: int = key(0, minimum=0)
    weight_decay: float = key(0.0, minimum=0)
    adam_epsilon: float = key(1e-8, minimum=0)
    max_grad_norm: float = key(1.0, minimum=0)
    optim: str = "adamw_torch"
    seed: int = key(42, minimum=0, maximum=LARGEST_SEED)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gradient_checkpointing: bool = False
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = key(0, minimum=0)
    logging_steps: int = key(10, minimum=1)
    save_steps: int | None = key(500, minimum=1)
    save_total_limit: int | None = key(2, minimum=1)
    report_to: Literal["auto", "none", "tensorboard", "wandb"] = "auto"
    use_cpu: bool = False

    # What only some kinds have as a key.
    batch_sampler = "batch_sampler"
    query_learning_rate = log_gradient_concentration = None


@dataclass(frozen=True)
class FastSection:
    """The switch of pylate-fastmaxsim, and the options of ``pylate_fastmaxsim.enable`` that concern the kind."""

    enabled: bool = True

    stock_masking = False  # of PyLate's losses only


@dataclass(frozen=True)
class EvaluationSection:
    """Retrieval, once at the end, by exact search.

    ``rows`` are held out of training: nDCG@10 over their documents or pages. All rows of a query are held out together, so
    that no query is both trained on and evaluated. Where queries stand in several rows, somewhat more rows than asked for
    are held out. ``batch_size`` texts or pages are encoded at once.
    """

    rows: int = key(0, minimum=0)
    batch_size: int = key(32, minimum=1)

    # What only some kinds have as a key.
    beir = nano_beir = corpus_format = None
    split = "test"


@dataclass(frozen=True)
class TextEvaluationSection(EvaluationSection):
    """Retrieval of texts, once at the end, by exact search, of one of three kinds or of none.

    ``rows`` are held out of training as those of an :class:`EvaluationSection`. For rows with a column of negatives there
    is also the accuracy of triplets (how often the positive scores higher than the first negative), and for distillation
    the KL divergence from the teacher's scores, as the library that trains the model computes it.

    ``beir`` names a collection in BEIR's layout: nDCG@10, MRR@10 and Recall@100 over its whole corpus. It is on the Hub
    (``BeIR/scifact``, ``mteb/scifact``), or a folder with corpus and queries as .jsonl or .parquet files and
    ``qrels/SPLIT.tsv`` or ``qrels.tsv`` in its layout or TREC's; ``split`` is that of the judgements.

    ``nano_beir`` lists sets of NanoBEIR by the names that PyLate's evaluator has for them, such as msmarco and nq: the
    same three metrics, each the mean over the sets.

    Of sparse vectors all three have FLOPS and the mean non-zeros of queries and documents beside them
    (docs/recipes.md). ``batch_size`` texts are encoded at once.
    """

    beir: str | None = key(None, on_hub="a collection")
    split: str = "test"
    nano_beir: list[str] | None = None


@dataclass(frozen=True)
class LateEvaluationSection(TextEvaluationSection):
    """``corpus_format`` compresses the documents of ``beir`` as they are encoded: the metrics are those of such documents."""

    corpus_format: CompressedFormat | None = None


@dataclass(frozen=True)
class Recipe:
    """One training run. Relative paths are relative to the working directory, and ``~`` is the home directory.

    Which keys the sections have depends on ``model.kind``: :data:`pylate_fastmaxsim.recipes.config.kinds.RECIPES`.
    """

    name: str
    output_dir: str = key(path=True)
    model: ModelSection
    data: DataSection
    loss: LossSection
    training: TrainingSection
    fast: FastSection
    evaluation: EvaluationSection

    mining = None  # of what only some kinds have
