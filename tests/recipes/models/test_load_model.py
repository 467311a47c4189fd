import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer, SparseEncoder

from pylate_fastmaxsim.recipes.config.kinds import MODELS
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import CONFIG_FILE, load_model, load_retriever, load_trained
from tests.support.case_tables import cases
from tests.support.recipe_kinds import LATE as LATE_KIND
from tests.support.saved_models import LATE, SPARSE, STATIC, embeddings
from tests.support.static_cases import save_table

TEXTS = ["late interaction scores every query token", "and writes no similarity tensor", "late"]
HOST = {"colbert": "ColBERT", "multi_vector": "MultiVectorEncoder"}[LATE_KIND]


def load(kind: str, name: str | Path, **keys):
    """A model as ``fastmaxsim search`` loads it, or as a recipe does that trains a kind."""
    if kind == "any":
        return load_retriever(str(name), "cpu")
    return load_model(MODELS[kind](name_or_path=str(name), **keys), "cpu", seed=0)


# The folder, the kind of a recipe or any, and keys of the section. Tables of 64 positions, of which XLM-R has two before
# the first token; ModernBERT's rotary ones limit queries only.
REFUSED = r"""
no tokenizer | LATE | | model.name_or_path FOLDER has no tokenizer that can be loaded
cut | LATE | | model.name_or_path FOLDER cannot be loaded: FOLDER/model.safetensors is not whole
bert | LATE | document_length: 65 | model.document_length must be at most 64, as many positions as BertModel
xlm-roberta | LATE | query_length: 63 | model.query_length must be at most 62, as many positions as XLMRobertaModel
modernbert | LATE | query_length: 129 | model.query_length must be at most 128, as many positions as ModernBertModel
sparse | splade | max_seq_length: 513 | model.max_seq_length must be at most 512, as many positions as BertForMasked
late | LATE | embedding_size: 8 | model.embedding_size must be 16 or null, because model.name_or_path FOLDER
sparse | LATE | | FOLDER does not fit model.kind LATE: it is a SparseEncoder, which model.kind splade trains.
dense | splade | | must be a masked language model, or a SparseEncoder with SpladePooling, but has the modules Transf
cosine | splade | | must score by the inner product \(dot\), but its similarity is cosine.
cosine | any | | MODEL FOLDER must score by the inner product \(dot\), but its similarity is cosine.
bert | any | | MODEL FOLDER must be .* or a StaticLateInteraction, but it has no config_sentence_transformers.json
dense of euclid | any | | MODEL FOLDER must score by cosine or the inner product \(dot\), but its similarity is euclidean.
Dense | any | | MODEL FOLDER has no MaxSim; use --dense: .* only Normalize may stand, got Dense
model2vec | any | | MODEL FOLDER cannot be loaded with model2vec
not json | any | | MODEL FOLDER cannot be loaded
nothing | any | | MODEL: there is no folder FOLDER
static | any | | MODEL FOLDER cannot be loaded: .*tables-.*safetensors is missing or damaged
"""
BESIDE_PYLATE = r"""
multi vector | multi_vector | | model.kind multi_vector needs Sentence Transformers 6, .*: pip install ".*(sentence-transformers|multi-vector)
late | splade | | FOLDER does not fit model.kind splade: it is a ColBERT, which model.kind colbert trains.
multi vector | colbert | | it is a MultiVectorEncoder, which model.kind multi_vector trains
multi vector | any | | FOLDER is a MultiVectorEncoder, which needs Sentence Transformers 6, but Sentence Transformers 5.* is
"""


@pytest.fixture
def folder(encoder, saved, tmp_path):
    def made(name: str) -> str:
        target, weights = tmp_path / "model", tmp_path / "model" / "model.safetensors"
        config, tokenizers = target / CONFIG_FILE, "tokenizer*" if name == "no tokenizer" else ""
        if name in ("multi vector", "not json"):
            target.mkdir()
            config.write_text('{"model_type": "MultiVectorEncoder"}' if name == "multi vector" else "{")
        elif name.startswith("dense"):
            SentenceTransformer(encoder("bert"), device="cpu").save_pretrained(str(target))
        elif name in ("model2vec", "Dense"):
            save_table(name, target, encoder("bert"))
            (target / "tokenizer.json").unlink() if name == "model2vec" else None
        elif name != "nothing":
            sources = {"late": saved(LATE), "sparse": saved(SPARSE), "cosine": saved(SPARSE), "static": saved(STATIC)}
            source = sources.get(name) or encoder(name if name in ("xlm-roberta", "modernbert") else "bert")
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(tokenizers))
        if name in ("cosine", "dense of euclid"):
            similarity = {"similarity_fn_name": "cosine" if name == "cosine" else "euclidean"}
            config.write_text(json.dumps(json.loads(config.read_text()) | similarity))
        if name == "static":
            next(target.glob("tables-*")).write_bytes(b"{")
        if name == "cut":
            weights.write_bytes(weights.read_bytes()[:5000])
        return str(target)

    return made


@pytest.mark.parametrize(
    ("name", "kind", "keys", "sentence"),
    cases(REFUSED) + (cases(BESIDE_PYLATE) if LATE_KIND == "colbert" else []),
)
def test_what_cannot_be_loaded_is_one_sentence(name, kind, keys, sentence, folder):
    made = folder(name)
    for each, value in {"FOLDER": made, "LATE": LATE_KIND}.items():
        kind, sentence = kind.replace(each, value), sentence.replace(each, value)
    with pytest.raises(RecipeError, match=sentence) as error:
        load(kind, made, **(yaml.safe_load(f"{{{keys}}}")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family, q, d", [("bert", 64, 64), ("xlm-roberta", 62, 62), ("modernbert", 128, 200)])
def test_texts_of_as_many_tokens_as_there_are_positions(family, q, d, encoder):
    model = load(LATE_KIND, encoder(family), query_length=q, document_length=d)
    for is_query, length in ((True, q), (False, d)):
        (embedding,) = embeddings(model, ["word " * 300], is_query)
        assert len(embedding) == length


def test_a_model_of_a_release_that_wrote_no_kind_is_told_by_its_lengths(saved, tmp_path):
    folder = Path(shutil.copytree(saved(LATE), tmp_path / "model"))
    config = json.loads((folder / CONFIG_FILE).read_text())
    del config["model_type"]
    (folder / CONFIG_FILE).write_text(json.dumps({"document_length": 32, **config}))
    assert type(load("any", folder)).__name__ == HOST


def test_a_masked_language_model_and_a_saved_model_are_those_of_sentence_transformers(saved):
    mlm = saved(SPARSE).removesuffix("model") + "mlm"
    expected = SparseEncoder(saved(SPARSE), device="cpu").encode(TEXTS).to_dense()
    for name in (saved(SPARSE), mlm):
        assert torch.equal(load("splade", name).encode(TEXTS).to_dense(), expected)
    short = load("splade", mlm, max_seq_length=4, config_kwargs={"hidden_dropout_prob": 0.0})
    assert short.tokenize(TEXTS)["input_ids"].shape == (3, 4)
    assert short[0].auto_model.config.hidden_dropout_prob == 0.0


def test_an_inference_free_model_weighs_the_tokens_of_a_query_and_survives_a_checkpoint(saved, tmp_path):
    keys = {"inference_free": True, "max_seq_length": 6}
    model = load("splade", saved(SPARSE), **keys)
    with torch.no_grad():
        model[0].sub_modules["query"][0].weight.copy_(torch.arange(len(model.tokenizer)))
    model.save_pretrained(str(tmp_path / "checkpoint"))
    again = load_trained(MODELS["splade"](name_or_path=saved(SPARSE), **keys), tmp_path / "checkpoint", "cpu")
    texts = ["late", "sum"]  # of no more tokens than max_seq_length
    queries = again.encode_query(texts).to_dense()
    for query, ids in zip(queries, model.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        assert query.nonzero().flatten().tolist() == sorted(set(ids))
        assert torch.equal(query[ids], torch.tensor(ids).float())
    expected = SparseEncoder(saved(SPARSE), device="cpu")
    expected.max_seq_length = 6
    assert torch.equal(again.encode_document(TEXTS).to_dense(), expected.encode(TEXTS).to_dense())
    with pytest.raises(RecipeError, match="model.inference_free must be true for output_dir .*, which has a route"):
        load_trained(MODELS["splade"](name_or_path=saved(SPARSE)), tmp_path / "checkpoint", "cpu")
