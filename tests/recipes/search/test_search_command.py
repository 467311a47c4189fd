import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from sentence_transformers import util

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.recipes.data import collection as beir
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import Retriever, retriever_of
from pylate_fastmaxsim.recipes.search import index
from pylate_fastmaxsim.reporting import progress
from pylate_fastmaxsim.retrieval.corpus import Corpus
from tests.support.beir_folder import write_folder
from tests.support.case_tables import case_table
from tests.support.command_line import fastmaxsim
from tests.support.recipe_kinds import LATE as HOST
from tests.support.saved_models import LATE, RETRIEVERS, SPARSE, STATIC, host_scores, save_retriever
from tests.support.searches import DOCUMENTS, NAMES, QUERIES, assert_same, read_run, search
from tests.support.static_cases import save_table
from tests.support.tiny_recipe import json_lines, text


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Blocks of a sparse index of 32 documents, which are encoded 16 at a time."""
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", 32)
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 2)


@pytest.mark.parametrize("kind", RETRIEVERS)
def test_the_run_file_has_the_ranking_and_the_scores_of_the_host(kind, saved, files, tmp_path, caplog, monkeypatch):
    run, result = tmp_path / "out" / "run.trec", tmp_path / "result.json"
    done = search(saved(kind), *files, "--k", 10**12, "--run", run)  # more than there are
    assert all(len(results) <= 150 for results in read_run(run).values())
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    with caplog.at_level("INFO", "pylate_fastmaxsim"):
        done = search(saved(kind), *files, "--k", 20, "--run", run, "--json", result)
    assert ("SPLADE without vocabulary logits" in caplog.text) == (kind != STATIC)
    expected = host_scores(load_retriever(saved(kind), "cpu"), QUERIES, DOCUMENTS).tolist()
    found = read_run(run)
    assert list(found) == [f"q{row}" for row in range(8)]  # those without judgements too
    for scores, results in zip(expected, found.values(), strict=True):
        named = dict(zip(NAMES, scores, strict=True))
        assert list(results.values()) == pytest.approx(sorted(scores, reverse=True)[:20], rel=1e-5)
        assert results == pytest.approx({name: named[name] for name in results}, rel=1e-5)
    written = json.loads(result.read_text())
    assert (written["kind"], written["documents"], written["queries"], written["metrics"]) == (kind, 150, 8, None)
    assert all(written["seconds"][task] > 0 for task in ("encode queries", "encode documents", "search"))
    assert "encode documents" in done.stdout and "documents/s" in done.stdout
    # Off a terminal a line now and then.
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("encode documents: 100%")]
    assert " 150/150 " in last and "\r" not in done.stderr.replace("\r\n", "")


# Of sparse ones whole blocks are kept.
@pytest.mark.parametrize(
    "kind, options", [(SPARSE, ""), (STATIC, "--no-exact"), (LATE, ""), (LATE, "--format residual-2")]
)
@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_index_goes_on_and_is_not_built_again(kind, options, saved, files, tmp_path, monkeypatch):
    kept = 112 if kind == LATE else 96
    folder, plain, again = tmp_path / "index", tmp_path / "plain.trec", tmp_path / "again.trec"
    command, stored = [saved(kind), *files, *options.split()], "--format" in options
    search(*command, *(["--index", tmp_path / "whole"] if stored else []), "--run", plain)
    encoded, encode, sample = [], Retriever.encode, 150 if stored else 0  # documents that train a codec

    def counted(stop_at: float):
        def inner(model, texts, batch_size, is_query):
            if not is_query:
                if sum(encoded) >= stop_at:
                    raise KeyboardInterrupt
                encoded.append(len(texts))
            return encode(model, texts, batch_size, is_query)

        encoded.clear()
        return inner

    monkeypatch.setattr(Retriever, "encode", counted(sample + 112))
    done = search(*command, "--index", folder, code=130)
    assert f"Interrupted: what is encoded is kept in {folder}, and the same command goes on from there." in done.stderr
    for left in (150 - kept, 0):
        monkeypatch.setattr(Retriever, "encode", counted(math.inf))
        search(*command, "--index", folder, "--run", again)
        assert sum(encoded) == left
        assert_same(again, plain)


def test_pooled_documents_are_those_of_the_host(saved, files, tmp_path):
    command, run = [saved(LATE), *files, "--index", tmp_path / "index"], tmp_path / "run"
    for _ in range(2):
        search(*command, "--pool-factor", 2, "--run", run, "--k", 150)
    model = load_retriever(saved(LATE), "cpu")
    if HOST == "multi_vector":
        from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

        pooled = model.encode_document(DOCUMENTS, token_pooling=HierarchicalTokenPooling(2), convert_to_numpy=True)
    else:
        pooled = model.encode(DOCUMENTS, is_query=False, pool_factor=2)
    expected = reference.maxsim(retriever_of(model).encode(QUERIES, 32, is_query=True), TokenBatch.from_list(pooled))
    for scores, found in zip(expected.tolist(), read_run(run).values(), strict=True):
        assert found == pytest.approx(dict(zip(NAMES, scores, strict=True)), rel=1e-5)
    assert "another model" in search(*command, code=2).stderr


def test_a_static_model_ranks_by_bounds_where_it_is_asked_to(saved, files, tmp_path):
    exact, bounds, indexed = (tmp_path / name for name in ("exact", "bounds", "indexed"))
    for run, *options in ((exact,), (bounds, "--no-exact"), (indexed, "--no-exact", "--index", tmp_path / "index")):
        search(saved(STATIC), *files, "--k", 150, "--run", run, *options)
    assert_same(indexed, bounds)
    model = load_retriever(saved(STATIC), "cpu")
    upper, positions = model.search(QUERIES, model.documents(DOCUMENTS), 150)
    different = 0
    for row, (found, scores) in enumerate(zip(read_run(bounds).values(), read_run(exact).values(), strict=True)):
        assert list(found.values()) == pytest.approx(upper[row][positions[row] >= 0].tolist(), rel=1e-5)
        assert len(scores) == 150 and all(scores[name] <= found[name] + 1e-5 for name in found)
        different += list(found) != list(scores)[: len(found)]
    assert different
    done = search(saved(STATIC), *files, "--index", tmp_path / "index", code=2)
    assert done.stderr.startswith("fastmaxsim: --index keeps vectors, of which a static model needs none for MaxSim;")


@pytest.mark.parametrize(("kind", "indexed"), [(SPARSE, False), (STATIC, True)])
def test_late_interaction_scores_the_candidates_of_a_first_stage_alone(kind, indexed, saved, files, tmp_path):
    first, whole, run, result = (tmp_path / name for name in ("first", "whole", "run", "result"))
    search(saved(kind), *files, "--k", 30, "--run", first, *(["--no-exact"] if kind == STATIC else []))
    search(saved(LATE), *files, "--k", 150, "--run", whole)
    stage = f"{kind.partition(' ')[0]}:{saved(kind)}"
    options = ["--first-stage", stage, "--candidates", 30, "--k", 10, *(["--index", tmp_path / "i"] if indexed else [])]
    candidates = read_run(first)
    for encoded in [150, 0] if indexed else [len({name for row in candidates.values() for name in row})]:
        done = search(saved(LATE), *files, *options, "--run", run, "--json", result)
        assert json.loads(result.read_text())["encoded_documents"] == encoded and "first stage" in done.stdout
        for (query, found), scores in zip(read_run(run).items(), read_run(whole).values(), strict=True):
            expected = {name: score for name, score in scores.items() if name in candidates[query]}
            assert [*found.items()] == [(name, pytest.approx(expected[name], rel=1e-5)) for name in [*expected][:10]]
    assert (
        "must be of the kind sparse, but"
        in search(saved(LATE), *files, "--first-stage", f"sparse:{saved(STATIC)}", code=2).stderr
    )


@pytest.mark.parametrize("made_by", ["StaticEmbedding", "Router", "model2vec"])
def test_a_table_of_a_library_is_ranked_by_maxsim_and_by_its_own_embeddings(made_by, files, encoder, tmp_path):
    folder, run, index = (tmp_path / name for name in ("table", "run", "index"))
    host = save_table(made_by, folder, encoder("bert"))
    dense = [util.normalize_embeddings(torch.as_tensor(host.encode(texts))) for texts in (QUERIES, DOCUMENTS)]
    if made_by == "Router":
        dense[0] = torch.from_numpy(host.encode_query(QUERIES))
    scores = {
        "--exact": host_scores(load_retriever(str(folder), "cpu"), QUERIES, DOCUMENTS),
        "--dense": dense[0] @ dense[1].T,
    }
    for option, expected in scores.items():
        search(folder, *files, "--k", 150, "--run", run, option)
        for row, found in zip(expected.tolist(), read_run(run).values(), strict=True):
            assert [found[name] for name in NAMES] == pytest.approx(row, abs=1e-5)
    command = [folder, *files, "--dense", "--index", index, "--format", "float16", "--json", tmp_path / "result.json"]
    search(*command), search(*command)
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["kind"], written["encoded_documents"]) == ("dense", 0)
    done = search(folder, *files, "--no-exact", code=2)
    assert "--no-exact needs a threshold; save a StaticLateInteraction that has one." in done.stderr


@pytest.mark.parametrize("name", ["float16", "int8", "fp8", "residual-2"])
def test_token_embeddings_are_kept_in_the_format_that_is_asked_for(name, saved, files, tmp_path):
    folder, result = tmp_path / "index", tmp_path / "result.json"
    command = [saved(LATE), *files, "--index", folder]
    search(*command, "--format", name)
    assert Corpus(folder / "documents").format == name.partition("-")[0]
    search(*command, "--format", name, "--json", result)
    assert json.loads(result.read_text())["encoded_documents"] == 0
    assert f"--index: {folder} was made with --format {name}" in search(*command, code=2).stderr


def test_an_index_of_something_else_is_refused(saved, files, tmp_path):
    folder, name, corpus = tmp_path / "index", saved(SPARSE), Path(files[1])

    def refused(said: str, model: str = name, index: Path = folder) -> bool:
        return f"--index{said}" in search(model, *files, "--index", index, code=2).stderr

    search(name, *files, "--index", folder)
    made = f": {folder} was made with another"
    assert refused(f"{made} model ({name}, or other weights or settings of ", saved(LATE))
    first, *rows = corpus.read_text().splitlines()
    corpus.write_text("\n".join([*rows, first]) + "\n")
    assert refused(f"{made} corpus")
    (folder / "search.json").write_text("{}")
    assert refused(f": {folder}/search.json is damaged, or of another release. Remove")
    assert refused(f" must be a folder for an index, but {corpus.parent} holds something else.", index=corpus.parent)


def test_a_digest_is_that_of_weights_settings_and_tokenizer(encoder, saved, tmp_path):
    def digest_of(name: str) -> str:
        return retriever_of(load_retriever(name, "cpu")).digest()

    def digest(kind: str, **options) -> str:
        number = len(list(tmp_path.iterdir()))
        return digest_of(save_retriever(kind, tmp_path / str(number), encoder("bert"), **options))

    for kind, options in {SPARSE: {"seed": 1}, STATIC: {"threshold": 0.5}}.items():
        assert digest(kind) == digest_of(saved(kind)) != digest(kind, **options)
    # The same weights, but one word has another id.
    swapped = Path(shutil.copytree(saved(SPARSE), tmp_path / "swapped")) / "tokenizer.json"
    rules = json.loads(swapped.read_text())
    words = sorted(rules["model"]["vocab"], key=rules["model"]["vocab"].get)[-2:]
    rules["model"]["vocab"] |= dict(zip(words, map(rules["model"]["vocab"].get, words[::-1]), strict=True))
    swapped.write_text(json.dumps(rules))
    assert digest_of(str(swapped.parent)) != digest(SPARSE)
    model = load_retriever(saved(LATE), "cpu")
    holders = (model[0], model[-2]) if HOST == "multi_vector" else (model, model)
    found = [digest(LATE), retriever_of(model).digest()]
    model.prompts["document"] = "passage: "
    for holder, key, value in zip(holders, ("document_length", "skiplist_words"), (12, ["a"]), strict=True):
        found.append(retriever_of(model).digest())
        setattr(holder, key, value)
    assert found[0] == found[1] and len({*found, retriever_of(model).digest()}) == 4


@pytest.mark.parametrize("kind", RETRIEVERS)
def test_one_command_at_a_time_builds_an_index_and_several_read_it(kind, saved, files, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    command = [saved(kind), *files, "--index", folder, *([] if kind != STATIC else ["--no-exact"])]
    with FileLock(folder / index.LOCK_FILE):
        assert f"--index: {folder} is being built by another command" in search(*command, code=2).stderr
    search(*command)
    with FileLock(folder / index.LOCK_FILE):
        written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        search(*command)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written


@case_table("""
arguments | said
| Name what to search: --beir FOLDER_OR_NAME, or --corpus and --queries
--beir DATA --queries DATA/queries.jsonl | Name what to search
--corpus DATA/corpus.txt --queries DATA/queries.jsonl | --corpus must be a file that ends in
--corpus DATA/corpus.jsonl --queries DATA/none.jsonl | --queries cannot be loaded
--corpus DATA/corpus.jsonl --queries DATA/spaced.jsonl --run DATA/run
    | --run: ids must have no white space, which separates the columns of a run file, but 'a b' is that of a query.
--beir DATA --run DATA | --run DATA cannot be written: it is a folder.
--beir DATA --run DATA/corpus.jsonl | --run DATA/corpus.jsonl cannot be written: it is what
--beir DATA --json DATA/qrels/test.tsv | --json DATA/qrels/test.tsv cannot be written: it is in
--beir DATA --json MODEL/config.json | --json MODEL/config.json cannot be written: it is in MODEL
--beir DATA --json DATA/../data/run --run DATA/run | --run and --json must be two files.
--beir DATA --no-exact | --no-exact is for a static model; every other is searched exactly.
--beir DATA --pool-factor 2 | A pool factor is for models of token embeddings; this one is sparse.
--beir DATA --first-stage bm25 | --first-stage is for late interaction, and for no index of PLAID.
--beir DATA --first-stage sparse | --first-stage must be bm25, sparse:
--beir DATA --candidates 9 | --candidates are those of a first stage; name it with --first-stage.
--beir DATA --dense | --dense is for a StaticEmbedding or a model of model2vec, but MODEL is a SparseEncoder.
--beir DATA --format float16 | --format is that of token embeddings in an index
--beir DATA --index DATA/i --format int4
    | --format must be one of float32, bfloat16, float16, int8, fp8, residual-1, residual-2, residual-4, got int4.
""")
def test_bad_input_is_one_line(arguments, said, saved, tmp_path):
    data = write_folder(tmp_path / "data")
    json_lines(data / "spaced.jsonl", [{"_id": "a b", "text": text(1, 3)}])
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    for name, value in {"DATA": str(data), "MODEL": saved(SPARSE)}.items():
        arguments, said = arguments.replace(name, value), said.replace(name, value)
    done = search(saved(SPARSE), *arguments.split(), code=2)
    assert done.stderr.startswith(f"fastmaxsim: {said}")
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    assert not done.stdout and not (data / "run").exists()


@pytest.mark.e2e  # ranx compiles for seconds
@pytest.mark.parametrize("kind", RETRIEVERS)
def test_metrics_are_those_of_the_evaluation(kind, saved, tmp_path):
    folder, result = write_folder(tmp_path / "data"), tmp_path / "result.json"
    done = search(saved(kind), "--beir", folder, "--json", result)
    metrics, collection = json.loads(result.read_text())["metrics"], beir.load_collection(str(folder))
    expected = ranking.evaluate_collection(retriever_of(load_retriever(saved(kind), "cpu")), collection, batch_size=8)
    for name in ranking.METRICS:
        assert metrics[name] == pytest.approx(expected[name], abs=1e-9)
    assert 0 < metrics["ndcg@10"] < 1 and metrics["recall@1000"] > metrics["recall@100"]
    assert f"{metrics['ndcg@10']:.4f}" in done.stdout
    files = [f"--{name}={folder}/{name}.jsonl" for name in ("corpus", "queries")]
    search(saved(kind), *files, "--qrels", folder / "qrels" / "test.tsv", "--k", 10, "--json", result)
    found = json.loads(result.read_text())
    # All queries are searched, and no metric looks further than the results.
    assert found["queries"] == len(collection.queries) + 2
    assert found["metrics"] == pytest.approx({name: metrics[name] for name in ("ndcg@10", "mrr@10")}, abs=1e-9)


@pytest.mark.parametrize("kind", [SPARSE, LATE])
def test_a_damaged_index_is_named_repaired_and_gone_on_with(kind, saved, files, small_parts, tmp_path):
    command = [saved(kind), *files, "--index", tmp_path / "index"]
    search(*command, "--run", tmp_path / "before")
    damaged = next((tmp_path / "index").rglob("block-00000002-*" if kind == SPARSE else "values.bin"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert str(damaged) in search(*command, code=2).stderr
    check = ["check", str(tmp_path / "index")]
    assert fastmaxsim(check).exit_code == 1
    assert "; repaired: " in fastmaxsim([*check, "--repair"]).stdout
    search(*command, "--run", tmp_path / "after")
    assert_same(tmp_path / "after", tmp_path / "before")
    assert fastmaxsim(check).stdout.endswith("of 150 documents; all is well\n")


@pytest.mark.cuda
@pytest.mark.parametrize("kind", RETRIEVERS)
def test_a_gpu_finds_what_a_cpu_finds(kind, saved, files, tmp_path, monkeypatch):
    folder, run, streamed, cpu = (tmp_path / name for name in ("index", "run", "streamed", "cpu"))
    for options in (["--index", folder, "--run", run], ["--run", streamed], ["--index", folder, "--run", run]):
        search(saved(kind), *files, *options)
    assert_same(run, streamed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    search(saved(kind), *files, "--run", cpu)
    assert_same(run, cpu, rel=1e-3)
