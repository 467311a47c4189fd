"""The keys of a recipe: their names, types, defaults and limits."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field
from typing import Any, Literal

# NumPy's largest seed; the trainer seeds NumPy too.
LARGEST_SEED = 2**32 - 1


def key(
    default: Any = MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    path: bool = False,
    null: str | None = None,
) -> Any:
    """A key with its default, its limits, whether it is a path, in which ``~`` is the home directory, and a word for null."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum, "path": path, "null": null})


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
class ModelSection:
    """The model: ``name_or_path`` on the Hub or on disk, ``build`` for one made from scratch, or ``token_table``.

    ``token_table`` names a ColBERT, on the Hub or on disk. A ColBERT is made of it whose encoder is a table: each token
    of the vocabulary has one vector, at first that which the named model gives it in a text of this token alone. A text
    is its own tokens, without special tokens and prefixes. Lengths that are null are those of the named model.

    ``kind: colbert`` is a text encoder trained with PyLate. ``config_kwargs`` goes to its configuration (for
    example its dropouts). The other keys are arguments of ``pylate.models.ColBERT``; null keeps the value of the
    checkpoint. ``embedding_size`` is for encoders without a projection. Code that comes with a checkpoint runs
    only if ``trust_remote_code`` is true.

    ``kind: multi_vector`` is a MultiVectorEncoder of Sentence Transformers 6, saved by it or by PyLate, or made of an
    encoder. It takes the same keys and ``attn_implementation``. ``embedding_size`` is again for encoders without a
    projection, where null is 128. ``query_length`` of queries that are expanded is the length of all of them.

    ``kind: splade`` is a SparseEncoder of Sentence Transformers, saved by it or made of a masked language model.
    ``max_seq_length`` is the largest number of tokens of a text; null keeps that of the checkpoint. ``inference_free``
    gives queries a weight for each token of the vocabulary in place of the encoder.

    ``kind: colpali`` and ``colqwen2`` retrieve images of pages and are trained with colpali-engine (the extra
    [colpali]). ``lora`` trains adapters only; null trains all weights. ``dtype`` is that of the weights: auto is
    bfloat16 for adapters on a GPU that has it, and float32 otherwise. ``attn_implementation`` is that of transformers.
    ``max_visual_tokens`` is the largest number of tokens of a page (colqwen2 only).
    """

    kind: Literal["colbert", "multi_vector", "splade", "colpali", "colqwen2"] = "colbert"
    name_or_path: str | None = key(None, path=True)
    build: BuildSection | None = None
    token_table: str | None = key(None, path=True)
    embedding_size: int | None = key(None, minimum=1)
    query_length: int | None = key(None, minimum=3)
    document_length: int | None = key(None, minimum=3)
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None
    max_seq_length: int | None = key(None, minimum=3)
    inference_free: bool = False
    config_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attn_implementation: str | None = None
    max_visual_tokens: int | None = key(None, minimum=1)
    lora: LoraSection | None = None

    @property
    def visual(self) -> bool:
        """Whether the documents are images."""
        return self.kind in ("colpali", "colqwen2")


_OF_ROWS = ("queries", "collection", "text_key", "negatives", "negatives_per_query", "n_ways")

# The keys of each source; the first one is required.
SOURCE_KEYS = {
    "docstrings": ("packages",),
    "hub": ("name", "config", "split", *_OF_ROWS),
    "files": ("files", *_OF_ROWS),
    "distillation": ("name", "split", "n_ways"),
}


@dataclass(frozen=True)
class DataSection:
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
    packages: list[str] | None = None
    name: str | None = key(None, path=True)
    config: str | None = None
    split: str | None = None
    files: list[str] | None = key(None, path=True)
    columns: list[str] | None = None
    queries: str | None = key(None, path=True)
    collection: str | None = key(None, path=True)
    text_key: str | None = None
    negatives: list[str] | None = None
    negatives_per_query: int | None = key(None, minimum=1)
    n_ways: int | None = key(None, minimum=2)
    max_rows: int | None = key(None, minimum=2)
    seed: int = key(0, minimum=0)
    streaming: bool = False


# How the embeddings of documents may be compressed: int8, fp8, and PLAID's residual codes of 1, 2 or 4 bits a number.
CompressedFormat = Literal["int8", "fp8", "residual-1", "residual-2", "residual-4"]


# The keys that each kind of first stage takes beside k; where there is a model it is required.
FIRST_STAGE_KEYS = {"sparse": ("model",), "static": ("model", "threshold"), "bm25": ("k1", "b")}


@dataclass(frozen=True)
class FirstStageSection:
    """A search for the ``k`` candidates of each query, of which alone mining computes late-interaction scores.

    It is an exact search of sparse vectors. ``kind: sparse`` takes those of ``model``, a SparseEncoder of Sentence
    Transformers; ``static`` those of a StaticLateInteraction in the folder ``model``, at its own threshold or at
    ``threshold``; ``bm25`` takes the tokens of the recipe's model, weighted by BM25 with ``k1`` and ``b``. A document
    that shares no term with a query is no candidate.
    """

    kind: Literal["sparse", "static", "bm25"]
    k: int = key(1000, minimum=1)
    model: str | None = key(None, path=True)
    threshold: float | None = None
    k1: float = key(1.5, minimum=0)
    b: float = key(0.75, minimum=0, maximum=1)


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

    pairs: DataSection
    teacher: str = key(path=True)
    corpus: DataSection | None = None
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


# Losses of colpali-engine, which are for models of pages.
LOSSES_WITH_NEGATIVES = ("colbert_negative_ce", "colbert_pairwise_negative_ce")
VISUAL_LOSSES = ("colbert", "colbert_pairwise_ce", "colbert_sigmoid", *LOSSES_WITH_NEGATIVES)


# The poolings that a recipe may name.
POOLING_KEYS = ("top_k", "softmax", "log_sum_exp")


@dataclass(frozen=True)
class PoolingSection:
    """How a query token pools its similarities to a document's tokens, in place of their maximum: one of three.

    ``top_k`` is the k of ``TopK``, ``softmax`` and ``log_sum_exp`` are the temperatures of ``Softmax`` and
    ``LogSumExp``; see :func:`pylate_fastmaxsim.pooled_scores`. The value changes over the training if there is a
    ``schedule``: from ``start`` in the first step to the one named by the pooling in the last, in equal steps or along
    half a cosine. k is rounded. Evaluation uses the value at the end.
    """

    top_k: int | None = key(None, minimum=1)
    softmax: float | None = key(None, minimum=0)
    log_sum_exp: float | None = key(None, minimum=0)
    start: float | None = key(None, minimum=0)
    schedule: Literal["linear", "cosine"] | None = None

    @property
    def name(self) -> str:
        """The key of the pooling."""
        return next(name for name in POOLING_KEYS if getattr(self, name) is not None)


@dataclass(frozen=True)
class RegularizersSection:
    """What makes the vectors of a SPLADE sparse: the regularizers of Sentence Transformers' ``SpladeLoss``.

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
    warmup_ratio: float = key(1 / 3, minimum=0, maximum=1)


@dataclass(frozen=True)
class LossSection:
    """A loss of colpali-engine, if its name begins with ``colbert``, or of PyLate. null keeps the default of an option.

    ``colbert_pairwise_ce`` is colpali-engine's ``ColbertPairwiseCELoss``, and so on. ``pooling`` is that of the scores of
    PyLate's losses and of the evaluation; null or ``max`` is the maximum.

    With ``model.kind: multi_vector`` it is one of Sentence Transformers' losses of late interaction: contrastive,
    ``cached_contrastive`` with mini-batches of ``mini_batch_size`` texts or ``mini_batch_num_tokens`` tokens, and for
    distillation the KL divergence or the margins, as ``objective`` says. Scores are divided by ``temperature``; null is 1.

    With ``model.kind: splade`` it is Sentence Transformers' ``SpladeLoss`` with ``regularizers``, or ``CachedSpladeLoss``
    for ``cached_contrastive`` and for distillation with a ``mini_batch_size``. Scores are divided by ``temperature``; null
    is 1, or 2 for the KL divergence. ``objective`` is what a distillation minimises: the KL divergence from the teacher's
    scores (null too), or the mean squared error of the margins between the first document and the others.
    """

    name: Literal[
        "contrastive",
        "cached_contrastive",
        "distillation",
        "colbert",
        "colbert_pairwise_ce",
        "colbert_sigmoid",
        "colbert_negative_ce",
        "colbert_pairwise_negative_ce",
    ] = "contrastive"
    temperature: float | None = key(None, minimum=0)
    size_average: bool | None = None
    mini_batch_size: int | None = key(None, minimum=1)
    mini_batch_num_tokens: int | None = key(None, minimum=1)
    score_mini_batch_size: int | None = key(None, minimum=1)
    gather_across_devices: bool | None = None
    normalize_scores: bool | None = None
    use_smooth_max: bool | None = None
    tau: float | None = key(None, minimum=0)
    pos_aware_negative_filtering: bool | None = None
    filter_threshold: float | None = None
    filter_factor: float | None = None
    in_batch_term_weight: float | None = key(None, minimum=0, maximum=1)
    norm_tol: float | None = key(None, minimum=0)
    max_batch_size: int | None = key(None, minimum=1)
    pooling: PoolingSection | None = key(None, null="max")
    objective: Literal["kl_divergence", "margin_mse"] | None = None
    regularizers: RegularizersSection | None = None

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
    ``log_gradient_concentration`` is every how many steps it is logged how concentrated gradients are on few document
    tokens (docs/diagnostics.md); null: never. ``query_learning_rate`` is that of the weights of queries of an
    inference-free SPLADE, which need a larger one than an encoder; null: ``learning_rate``.
    """

    per_device_train_batch_size: int = key(32, minimum=1)
    gradient_accumulation_steps: int = key(1, minimum=1)
    num_train_epochs: float = key(1.0, minimum=0)
    max_steps: int | None = key(None, minimum=1)
    learning_rate: float = key(3e-6, minimum=0)
    query_learning_rate: float | None = key(None, minimum=0)
    lr_scheduler_type: str = "linear"
    warmup_steps: int = key(0, minimum=0)
    weight_decay: float = key(0.0, minimum=0)
    adam_epsilon: float = key(1e-8, minimum=0)
    max_grad_norm: float = key(1.0, minimum=0)
    optim: str = "adamw_torch"
    seed: int = key(42, minimum=0, maximum=LARGEST_SEED)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gradient_checkpointing: bool = False
    batch_sampler: Literal["batch_sampler", "no_duplicates"] = "batch_sampler"
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = key(0, minimum=0)
    logging_steps: int = key(10, minimum=1)
    save_steps: int | None = key(500, minimum=1)
    save_total_limit: int | None = key(2, minimum=1)
    report_to: Literal["auto", "none", "tensorboard", "wandb"] = "auto"
    log_gradient_concentration: int | None = key(None, minimum=1)
    use_cpu: bool = False


@dataclass(frozen=True)
class FastSection:
    """Whether pylate-fastmaxsim is switched on, and the options of ``pylate_fastmaxsim.enable``.

    ``stock_masking`` concerns ``model.kind`` colbert only, ``padding_free`` and ``compile``
    also multi_vector and splade.
    """

    enabled: bool = True
    padding_free: bool = True
    compile: bool = False
    stock_masking: bool = False


@dataclass(frozen=True)
class EvaluationSection:
    """Retrieval, once at the end, of one of three kinds or of none.

    ``rows`` are held out of training: nDCG@10 over their documents, by PyLate's own evaluator, or over their pages,
    scored by the processor of the model. All rows of a query are held out together, so that no query is both trained
    on and evaluated. Where queries stand in several rows, somewhat more rows than asked for are held out. PyLate's
    evaluators add, for rows with a column of negatives, the accuracy of triplets (how often the positive scores higher
    than the first negative) and, for distillation, the KL divergence from the teacher's scores.

    ``beir`` names a collection in BEIR's layout: nDCG@10, MRR@10 and Recall@100 by exact search over its whole corpus.
    It is on the Hub (``BeIR/scifact``, ``mteb/scifact``), or a folder with corpus and queries as .jsonl or .parquet
    files and ``qrels/SPLIT.tsv`` or ``qrels.tsv`` in its layout or TREC's; ``split`` is that of the judgements.

    ``nano_beir`` lists sets of NanoBEIR by the names that PyLate's evaluator has for them, such as msmarco and nq: the
    same three metrics by that evaluator, each the mean over the sets.

    For ``model.kind: splade`` all three are by exact sparse search, with FLOPS and the mean non-zeros of queries and
    documents beside them (docs/recipes.md).

    ``corpus_format`` compresses the documents of ``beir`` as they are encoded, so that the metrics are those of compressed
    documents. ``batch_size`` texts are encoded at once.
    """

    rows: int = key(0, minimum=0)
    beir: str | None = key(None, path=True)
    split: str = "test"
    nano_beir: list[str] | None = None
    corpus_format: CompressedFormat | None = None
    batch_size: int = key(32, minimum=1)


@dataclass(frozen=True)
class Recipe:
    """One training run. Relative paths are relative to the working directory, and ``~`` is the home directory."""

    name: str
    output_dir: str = key(path=True)
    model: ModelSection
    data: DataSection
    loss: LossSection = field(default_factory=LossSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    fast: FastSection = field(default_factory=FastSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    mining: MiningSection | None = None
