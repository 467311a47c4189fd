"""Static models of texts: BM25 beside a library of it, tables of Sentence Transformers and model2vec, and their files."""

import json
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pylate_fastmaxsim import BM25, StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from tests.support.paths import CRANFIELD
from tests.support.static_cases import VOCABULARY, tables, texts

WORDS = ["bees", "wasps", "bread", "yeast", "[UNK]", "[PAD]"]


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=5, pad_token="[PAD]")
    tokenizer.enable_truncation(2)
    return tokenizer


def vectors() -> torch.Tensor:
    return torch.randn(len(WORDS), 4, generator=torch.Generator().manual_seed(0))


def words(name: str) -> list[list[str]]:
    rows = map(json.loads, (CRANFIELD / name).read_text(encoding="utf-8").splitlines())
    return [re.findall(r"\w+", f"{row.get('title', '')} {row['text']}".lower()) for row in rows]


def test_threshold_1_ranks_as_bm25():
    bm25s = pytest.importorskip("bm25s", reason="needs a library of BM25: pip install bm25s")
    if not CRANFIELD.exists():
        pytest.skip(f"needs the collection in {CRANFIELD}")
    k1, b = 0.9, 0.4
    documents, queries = words("corpus.jsonl"), words("queries.jsonl")[:60]
    vocabulary = {word: number for number, word in enumerate(sorted({word for row in documents for word in row}))}
    library = bm25s.BM25(k1=k1, b=b, method="lucene", idf_method="lucene", dtype="float64")
    library.index(documents, show_progress=False)
    expected = torch.from_numpy(np.stack([library.get_scores(query) for query in queries])).double()

    asked, collection = (
        TokenIds.from_lists([[vocabulary[word] for word in row if word in vocabulary] for row in rows])
        for rows in (queries, documents)
    )
    table = torch.randn(len(vocabulary), 16, generator=torch.Generator().manual_seed(0))
    of_vectors = StaticLateInteraction(table, threshold=1, query_weights="idf", document_weights=BM25(k1, b))
    for model in (of_vectors, StaticLateInteraction.bm25(None, len(vocabulary), k1, b)):
        model.fit([collection.part(0, 900), collection.part(900, 1400)])
        scores, positions = model.search(asked, collection, 50)
        # Where the library's scores are equal up to rounding, the order is any.
        torch.testing.assert_close(expected.gather(1, positions), scores.double(), rtol=1e-5, atol=0)
        torch.testing.assert_close(expected.sort(descending=True).values[:, :50], scores.double(), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="bound: scores with BM25 weights are no bounds of MaxSim"):
        of_vectors.bound(asked)


def test_below_threshold_1_similar_tokens_count_by_their_similarity():
    """The largest of the similarity's power times saturation over the tokens of a document, where both count."""
    queries, stored = tables("cpu")
    model = StaticLateInteraction(queries, stored, threshold=0.6, document_weights=BM25(1.2, 0.5, power=2))
    with pytest.raises(ValueError, match="BM25 needs counts of tokens; call fit with all documents first"):
        model.documents(texts(3, 5, seed=0))
    collection = texts(30, 25, seed=0)
    found = torch.from_numpy(model.fit(collection).documents(collection).to_scipy().toarray()).double()
    mean = len(collection.ids) / len(collection)
    similarities = model.query_vectors.double() @ model.document_vectors.double().T
    similarities = similarities.masked_fill(similarities < 0.6, 0) ** 2
    for row, ids in zip(found, collection.ids.long().split(collection.lengths.tolist()), strict=True):
        counts = torch.bincount(ids, minlength=VOCABULARY).double()
        saturated = counts / (counts + 1.2 * (0.5 + 0.5 * len(ids) / mean))
        torch.testing.assert_close(row, (similarities * saturated).amax(dim=1), rtol=0, atol=2e-6)


def test_the_table_of_a_static_embedding_encodes_as_it_does():
    modules = pytest.importorskip("sentence_transformers").models
    module = modules.StaticEmbedding(word_tokenizer(), embedding_weights=vectors())
    whole = pytest.importorskip("sentence_transformers").SentenceTransformer(modules=[module], device="cpu")
    model = StaticLateInteraction.from_static_embedding(whole, threshold=0.2, normalize=False)
    other = modules.StaticEmbedding(module.tokenizer, embedding_weights=2 - vectors())
    sides = modules.Router.for_query_document([module], [other, modules.Normalize()])
    both = StaticLateInteraction.from_static_embedding(torch.nn.Sequential(sides), threshold=0.2, normalize=False)
    assert torch.equal(both.query_vectors, vectors()) and torch.equal(both.document_vectors, 2 - vectors())
    with pytest.raises(TypeError, match="must be a StaticEmbedding or a SentenceTransformer .* got str"):
        StaticLateInteraction.from_static_embedding("minishlab/potion", threshold=0.2)
    other.tokenizer = Tokenizer(models.WordLevel({}))
    with pytest.raises(ValueError, match="queries and documents must have the same tokenizer"):
        StaticLateInteraction.from_static_embedding(torch.nn.Sequential(sides), threshold=0.2)
    sentences = ["bees bread", "yeast honey bees bread"]
    features = model.token_ids(sentences)
    # What the module means over.
    means = torch.stack([model.query_vectors[ids.long()].mean(dim=0) for ids in features.ids.split([2, 4])])
    assert features.ids.tolist() == [0, 2, 3, 4, 0, 2]
    module.tokenizer.no_truncation()
    torch.testing.assert_close(module(module.tokenize(sentences))["sentence_embedding"], means)
    assert model.token_ids([]).offsets.tolist() == [0]


@pytest.mark.parametrize("quantized", [False, True])
def test_the_table_of_a_model2vec_encodes_as_it_does(quantized):
    model2vec = pytest.importorskip("model2vec", reason="needs model2vec: pip install model2vec")
    own = {}
    if quantized:
        own = {"token_mapping": np.array([0, 0, 1, 2, 2, 1]), "weights": np.linspace(0.5, 2, 6)}
    host = model2vec.StaticModel(vectors().numpy()[: 3 if quantized else 6], word_tokenizer(), **own)
    model = StaticLateInteraction.from_model2vec(host, threshold=0.2, normalize=False)
    sentences = ["bees honey bread yeast", "honey"]
    expected = [torch.as_tensor(each).float() for each in host.encode_as_sequence(sentences)]
    # Unknown words are left out.
    assert model.query_skiplist == model.skiplist == [4]
    tokens = model.token_ids(sentences).without([4], len(WORDS))
    found = model.query_vectors[tokens.ids.long()].split(tokens.lengths.tolist())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert model.queries(sentences).offsets.diff().tolist() == tokens.lengths.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.3, "query_weights": "idf", "document_weights": BM25(1.2, 0.3)},
        {"threshold": "lowest", "query_weights": torch.rand(6), "document_weights": torch.rand(6)},
        {"threshold": 0.1, "neighbours": 2, "skiplist": [4], "query_skiplist": [1], "keep": "value"},
    ],
    ids=["bm25", "own", "cap"],
)
def test_a_saved_model_is_the_same(options, tmp_path):
    sentences = ["bees bread", "yeast bread bread", "wasps"]
    model = StaticLateInteraction(vectors(), vectors().flip(0), word_tokenizer(), **options)
    if model.bm25_weights:
        model.fit(sentences)
    for _ in range(2):
        model.save(tmp_path)
    loaded = StaticLateInteraction.load(tmp_path)
    assert vars(loaded)["thresholds"].equal(model.thresholds)  # they take a product of the tables
    for ours, other in ((model, loaded), (model.to("cpu"), loaded.to("cpu"))):
        assert all(map(torch.equal, *(each.search(sentences, sentences, 3) for each in (ours, other))))
        assert ours.documents(sentences).weights.equal(other.documents(sentences).weights)
    model.tokenizer = None
    model.save(tmp_path), model.save(tmp_path)  # what may still be read goes with the second
    assert StaticLateInteraction.load(tmp_path).tokenizer is None and not [*tmp_path.glob("tokenizer-*")]
