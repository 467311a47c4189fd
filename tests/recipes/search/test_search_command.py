"""``fastmaxsim search``: its rankings are those of the hosts, an index goes on where it was killed, bad input is one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fast_plaid.search import FastPlaid
from filelock import FileLock
from pylate.scores import colbert_scores
from transformers import AutoTokenizer

from pylate_fastmaxsim import CompressedBatch, StaticLateInteraction, TokenBatch, read_plaid
from pylate_fastmaxsim.compressed import rounded_queries
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.recipes.data import collection as beir
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import Retriever, retriever_of
from pylate_fastmaxsim.recipes.search import index
from pylate_fastmaxsim.recipes.search.run import Clock
from pylate_fastmaxsim.retrieval.corpus import Corpus
from tests.support import models
from tests.support.beir_folder import tables, write_folder
from tests.support.command_line import fastmaxsim
from tests.support.plaid_indexes import PLAID, merge_chunks
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.static_cases import save_static
from tests.support.tiny_recipe import text

KINDS = ("sparse", "late interaction", "static late interaction")


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> dict[str, str]:
    """The folder of a tiny model of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    models.load_model(encoder("bert")).save_pretrained(str(folder / "colbert"))
    sparse = build_sparse_encoder(folder / "sparse", encoder("bert"))
    save_static(folder / "static", encoder("bert"))
    return {"sparse": sparse, "late interaction": str(folder / "colbert"), KINDS[2]: str(folder / "static")}


@pytest.fixture
def files(tmp_path) -> list[str]:
    """The arguments that name documents and queries."""
    folder = write_folder(tmp_path / "data")
    return ["--corpus", f"{folder}/corpus.jsonl", "--queries", f"{folder}/queries.jsonl"]


@pytest.fixture(autouse=True)
def on_cpu(request, monkeypatch) -> None:
    """Kernels know the size of a block, which tests change."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """A sparse index has blocks of 32 documents. Documents are encoded 16 at a time."""
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", 32)
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 2)


def search(*arguments: object, code: int = 0):
    done = fastmaxsim(["search", *map(str, arguments), "--batch-size", "8"])
    assert done.exit_code == code, done.output
    return done


def read_run(file: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for line in file.read_text().splitlines():
        query, q0, document, rank, score, tag = line.split(" ")
        found.setdefault(query, {})[document] = float(score)
        assert (q0, int(rank), tag) == ("Q0", len(found[query]), "fastmaxsim")
    return found


def assert_same(run: Path, other: Path, rel: float = 1e-5) -> None:
    """The same documents with the same scores, up to rounding: texts may have been encoded in other batches."""
    found, expected = read_run(run), read_run(other)
    assert list(found) == list(expected)
    for query, results in found.items():
        assert results == pytest.approx(expected[query], rel=rel)


def host_scores(name: str, queries: list[str], documents: list[str]) -> list[list[float]]:
    """Each query against each document, by the library of the model."""
    model = load_retriever(name, "cpu")
    if "sparse" in name:
        return model.similarity(model.encode_query(queries), model.encode_document(documents)).to_dense().tolist()
    if isinstance(model, StaticLateInteraction):
        tables = (model.query_vectors.double(), model.document_vectors.double())
        ids = [[model.token_ids([text]).ids.long() for text in texts] for texts in (queries, documents)]
        vectors = [[table[each] for each in side] for table, side in zip(tables, ids, strict=True)]
        return [[(q @ d.T).amax(dim=1).sum().item() for d in vectors[1]] for q in vectors[0]]
    encoded = model.encode(documents, is_query=False, convert_to_tensor=True)
    return [
        [colbert_scores(query[None], document[None]).item() for document in encoded]
        for query in model.encode(queries, is_query=True, convert_to_tensor=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_file_has_the_ranking_and_the_scores_of_the_host(kind, saved, files, tmp_path):
    run, result = tmp_path / "out" / "run.trec", tmp_path / "result.json"
    done = search(saved[kind], *files, "--k", 10**12, "--run", run)  # more than there are
    assert all(len(results) <= 150 for results in read_run(run).values())
    done = search(saved[kind], *files, "--k", 20, "--run", run, "--json", result)
    content = tables()
    documents = [f"{row['title']} {row['text']}".strip() for row in content["corpus"]]
    expected = host_scores(saved[kind], [row["text"] for row in content["queries"]], documents)
    found = read_run(run)
    assert list(found) == [row["_id"] for row in content["queries"]]  # those without judgements too
    for scores, results in zip(expected, found.values(), strict=True):
        named = dict(zip((row["_id"] for row in content["corpus"]), scores, strict=True))
        assert list(results.values()) == pytest.approx(sorted(scores, reverse=True)[:20], rel=1e-5)
        assert results == pytest.approx({name: named[name] for name in results}, rel=1e-5)
    written = json.loads(result.read_text())
    assert (written["kind"], written["documents"], written["queries"], written["metrics"]) == (kind, 150, 8, None)
    assert all(written["seconds"][task] > 0 for task in ("encode queries", "encode documents", "search"))
    assert "encode documents" in done.stdout and "documents/s" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_index_goes_on_and_a_finished_one_encodes_nothing(
    kind, saved, files, small_parts, tmp_path, monkeypatch
):
    folder, plain, again = tmp_path / "index", tmp_path / "plain.trec", tmp_path / "again.trec"
    search(saved[kind], *files, "--run", plain)
    encoded, encode = [], Retriever.encode

    def counted(stop_at: int | None = None) -> Callable:
        def inner(model, texts, batch_size, is_query):
            if not is_query:
                if stop_at is not None and sum(encoded) >= stop_at:
                    raise KeyboardInterrupt
                encoded.append(len(texts))
            return encode(model, texts, batch_size, is_query)

        encoded.clear()
        return inner

    monkeypatch.setattr(Retriever, "encode", counted(stop_at=112))
    done = search(saved[kind], *files, "--index", folder, code=130)
    assert f"Interrupted: what is encoded is kept in {folder}, and the same command goes on from there." in done.stderr
    # Of a sparse index whole blocks.
    kept = 112 if kind == "late interaction" else 96
    monkeypatch.setattr(Retriever, "encode", counted())
    search(saved[kind], *files, "--index", folder, "--run", again)
    assert sum(encoded) == 150 - kept
    assert_same(again, plain)
    monkeypatch.setattr(Retriever, "encode", counted())
    search(saved[kind], *files, "--index", folder, "--run", again)
    assert not encoded
    assert_same(again, plain)


KILLED = """
import os
from pylate_fastmaxsim.cli import main
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.models.retriever import Retriever
from pylate_fastmaxsim.retrieval.formats import writer
postings.DOCUMENTS_PER_BLOCK, writer.SECONDS_BETWEEN_NOTES = 32, 0
ranking.BATCHES_AT_ONCE = 2
encode, calls = Retriever.encode, iter(range(5))  # 16 documents each
def killed(model, texts, batch_size, is_query):
    return os._exit(9) if not is_query and next(calls, None) is None else encode(model, texts, batch_size, is_query)
Retriever.encode = killed
main()
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_index_goes_on(kind, saved, files, small_parts, tmp_path):
    folder, result = tmp_path / "index", tmp_path / "result.json"
    arguments = [*files, "--index", folder]
    command = [sys.executable, "-c", KILLED, "search", saved[kind], *arguments, "--batch-size", "8"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    killed = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)
    assert killed.returncode == 9, killed.stderr
    search(saved[kind], *arguments, "--json", result)
    assert json.loads(result.read_text())["encoded_documents"] == 150 - (80 if kind == "late interaction" else 64)


def test_a_static_model_ranks_by_bounds_where_it_is_asked_to(saved, files, encoder, tmp_path):
    exact, bounds, indexed = (tmp_path / name for name in ("exact", "bounds", "indexed"))
    search(saved[KINDS[2]], *files, "--k", 150, "--run", exact)
    search(saved[KINDS[2]], *files, "--k", 150, "--run", bounds, "--no-exact")
    search(saved[KINDS[2]], *files, "--k", 150, "--run", indexed, "--no-exact", "--index", tmp_path / "index")
    assert_same(indexed, bounds)
    model = load_retriever(saved[KINDS[2]], "cpu")
    content = tables()
    documents = [f"{row['title']} {row['text']}".strip() for row in content["corpus"]]
    upper, positions = model.search([row["text"] for row in content["queries"]], documents, 150)
    different = 0
    for row, (found, scores) in enumerate(zip(read_run(bounds).values(), read_run(exact).values(), strict=True)):
        assert list(found.values()) == pytest.approx(upper[row][positions[row] >= 0].tolist(), rel=1e-5)
        assert len(scores) == 150 and all(scores[name] <= found[name] + 1e-5 for name in found)
        different += list(found) != list(scores)[: len(found)]
    assert different
    save_static(tmp_path / "other", encoder("bert"), threshold=0.5)
    done = search(tmp_path / "other", *files, "--index", tmp_path / "index", code=2)
    assert f"--index: {tmp_path / 'index'} was made with another model" in done.stderr
    done = search(saved["sparse"], *files, "--no-exact", code=2)
    assert "--no-exact is for a static model; every other is searched exactly." in done.stderr


def test_bm25_ranks_by_its_own_scores_once_it_has_counted(encoder, files, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(encoder("bert")).backend_tokenizer
    model = StaticLateInteraction.bm25(tokenizer, tokenizer.get_vocab_size())
    model.save(tmp_path / "model")
    done = search(tmp_path / "model", *files, code=2)
    assert "fastmaxsim: The static model cannot encode: " in done.stderr and "fit" in done.stderr
    content = tables()
    documents = [f"{row['title']} {row['text']}".strip() for row in content["corpus"]]
    model.fit(documents).save(tmp_path / "model")
    search(tmp_path / "model", *files, "--k", 20, "--run", tmp_path / "run")
    scores, positions = model.search([row["text"] for row in content["queries"]], documents, 20)
    for row, found in enumerate(read_run(tmp_path / "run").values()):
        names = [content["corpus"][place]["_id"] for place in positions[row].tolist() if place >= 0]
        assert list(found) == names and list(found.values()) == pytest.approx(
            scores[row].tolist()[: len(names)], rel=1e-5
        )


FORMATS = ["float16", "int8", "fp8", "residual-2"]


@pytest.mark.parametrize("name", FORMATS)
def test_token_embeddings_are_kept_in_the_format_that_is_asked_for(name, saved, files, tmp_path):
    model, folder, run, result = (
        saved["late interaction"],
        tmp_path / "index",
        tmp_path / "run",
        tmp_path / "result.json",
    )
    search(model, *files, "--index", folder, "--format", name, "--run", run)
    # The scores are those of what is stored.
    stored = Corpus(folder / "documents")
    documents = [
        document[live] for batch in stored.batches() for document, live in zip(*plain(batch).to_padded(), strict=True)
    ]
    content = tables()
    queries = load_retriever(model, "cpu").encode([row["text"] for row in content["queries"]], is_query=True)
    names = [row["_id"] for row in content["corpus"]]
    for query, found in zip(queries, read_run(run).values(), strict=True):
        query = rounded(torch.as_tensor(query), name)
        scores = {each: (query @ d.T).amax(dim=1).sum().item() for each, d in zip(names, documents, strict=True)}
        assert len(found) == 150 and found == pytest.approx(scores, rel=1e-5)
    assert stored.format == name.partition("-")[0]
    search(model, *files, "--index", folder, "--format", name, "--json", result)
    assert json.loads(result.read_text())["encoded_documents"] == 0
    done = search(model, *files, "--index", folder, code=2)
    assert f"--index: {folder} was made with --format {name}" in done.stderr


def plain(batch: TokenBatch | CompressedBatch) -> TokenBatch:
    """Documents as they are scored, in float64."""
    if isinstance(batch, CompressedBatch):
        return batch.decompress(torch.float64)
    return batch.with_values(batch.values.double())


def rounded(query: torch.Tensor, name: str) -> torch.Tensor:
    """A query as documents of this format are scored with it."""
    if name in ("int8", "fp8"):
        values, scales = rounded_queries(query, name)
        return values.double() * scales[:, None].double()
    return (query.to(getattr(torch, name)) if name in ("bfloat16", "float16") else query).double()


def test_an_interrupted_index_goes_on_with_its_codec(saved, files, small_parts, tmp_path, monkeypatch):
    model, folder, run, whole = saved["late interaction"], tmp_path / "index", tmp_path / "run", tmp_path / "whole"
    calls, encode = [], Retriever.encode

    def stopping(model, texts, batch_size, is_query):
        if not is_query:
            calls.append(texts)
            if len(calls) == 10 + 5:  # of the sample, and of the corpus
                raise KeyboardInterrupt
        return encode(model, texts, batch_size, is_query)

    monkeypatch.setattr(Retriever, "encode", stopping)
    search(model, *files, "--index", folder, "--format", "residual-2", code=130)
    codec = (folder / "documents" / "codec.safetensors").read_bytes()
    monkeypatch.setattr(index, "train_codec", None)
    search(model, *files, "--index", folder, "--format", "residual-2", "--run", run)
    assert len(calls) - 10 - 5 == 10 - 4 and (folder / "documents" / "codec.safetensors").read_bytes() == codec
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    search(model, *files, "--index", tmp_path / "other", "--format", "residual-2", "--run", whole)
    assert_same(run, whole)


def test_damage_that_is_found_while_searching_is_one_line(saved, files, tmp_path):
    search(saved["late interaction"], *files, "--index", tmp_path / "index", "--format", "int8")
    file = tmp_path / "index" / "documents" / "bounds.bin"
    bounds = np.fromfile(file, np.int64)
    bounds[3] = 10**6
    bounds.tofile(file)
    done = search(saved["late interaction"], *files, "--index", tmp_path / "index", "--format", "int8", code=2)
    assert f"fastmaxsim: --index: Corpus: {file} is damaged" in done.stderr


@pytest.fixture
def plaid(saved, files, tmp_path) -> PLAID:
    """PyLate's index of the documents in another order, without two of them, in the folder plaid/index."""
    rows = tables()["corpus"][::-1]
    index = PLAID(str(tmp_path / "plaid"), "index", nbits=4, device="cpu", show_progress=False)
    encoded = load_retriever(saved["late interaction"], "cpu").encode(
        [f"{row['title']} {row['text']}".strip() for row in rows], is_query=False
    )
    index.add_documents([row["_id"] for row in rows], encoded)
    return index.remove_documents(["0003", "0110"])


def test_an_index_of_plaid_is_searched_exhaustively_and_compared_with_its_own_search(
    plaid, saved, files, tmp_path, monkeypatch
):
    model, folder, run, result = (
        saved["late interaction"],
        tmp_path / "plaid" / "index",
        tmp_path / "run",
        tmp_path / "j",
    )
    order, during, load = [], Clock.during, FastPlaid.__init__
    monkeypatch.setattr(Clock, "during", lambda clock, task: order.append(task) or during(clock, task))
    monkeypatch.setattr(FastPlaid, "__init__", lambda *args, **options: order.append("load") or load(*args, **options))
    done = search(model, *files, "--plaid", folder, "--run", run, "--json", result)
    assert order[-2:] == ["load", "PLAID's search"]  # as the time of exhaustive search is without opening the index
    corpus = read_plaid(folder)
    (batch,) = corpus.batches()
    documents = [each[live] for each, live in zip(*batch.decompress(torch.float64).to_padded(), strict=True)]
    queries = load_retriever(model, "cpu").encode([row["text"] for row in tables()["queries"]], is_query=True)
    found = read_run(run)
    for query, scores in zip(queries, found.values(), strict=True):
        exact = [(torch.as_tensor(query).double() @ d.T).amax(dim=1).sum().item() for d in documents]
        assert len(scores) == 148 and scores == pytest.approx(dict(zip(corpus.ids, exact, strict=True)), rel=1e-5)
    own = plaid([torch.as_tensor(query) for query in queries], k=149)
    content = json.loads(result.read_text())
    for depth in (10, 100):
        shares = [
            len(set(list(scores)[:depth]) & {row["id"] for row in results[:depth]}) / depth
            for scores, results in zip(found.values(), own, strict=True)
        ]
        share = sum(shares) / len(shares)
        assert share > 0.3 and content["plaid"][f"overlap@{depth}"] == pytest.approx(share)
        assert f"{content['plaid'][f'overlap@{depth}']:.1%} of the top {depth}" in done.stdout
    assert (content["documents"], content["encoded_documents"], content["plaid"]["metrics"]) == (148, 0, None)


def test_an_index_of_plaid_that_does_not_fit_is_one_line(plaid, saved, files, tmp_path):
    model, folder = saved["late interaction"], tmp_path / "plaid" / "index"

    def refused(*arguments: object, model: str = model) -> str:
        done = search(model, *arguments, code=2)
        assert done.stderr.startswith("fastmaxsim: ") and done.stderr.count("\n") == 1
        return done.stderr

    needs = "--plaid is an index of its own; it needs a ColBERT and no --index."
    assert needs in refused(*files, "--plaid", folder, "--index", tmp_path / "index")
    assert needs in refused(*files, "--plaid", folder, model=saved["sparse"])
    assert "--plaid: read_plaid: " in refused(*files, "--plaid", tmp_path)
    bare = f"--plaid: {folder / 'fast_plaid_index'} has no ids, so it must hold the 150 documents of the corpus in their order"
    ids = folder / "plaid_ids_to_documents_ids.pkl"
    known = pickle.loads(ids.read_bytes())
    ids.unlink()
    assert bare in refused(*files, "--plaid", folder / "fast_plaid_index")
    ids.write_bytes(pickle.dumps(known | {5: "0001"}))
    assert "must hold each document once, but 0001 is there twice." in refused(*files, "--plaid", folder)
    ids.write_bytes(pickle.dumps(known | {5: "x"}))
    assert "holds the document x, which is not in the corpus." in refused(*files, "--plaid", folder)
    ids.write_bytes(pickle.dumps(known))
    codes = folder / "fast_plaid_index" / "0.codes.npy"
    np.save(codes, np.load(codes) + 10**6)
    assert "--plaid: Corpus: codes of the documents of " in refused(*files, "--plaid", folder)
    other = PLAID(str(tmp_path / "plaid"), "other", device="cpu", show_progress=False)
    other.add_documents(["0001", "0002"], [torch.eye(8), torch.eye(8)])
    said = refused(*files, "--plaid", tmp_path / "plaid" / "other")
    assert "holds embeddings of d = 8, but MODEL makes embeddings of d = 16." in said


def test_without_plaids_own_search_it_says_why(plaid, saved, files, tmp_path):
    folder, result = tmp_path / "plaid" / "index", tmp_path / "result.json"
    (folder / "fast_plaid_index" / "avg_residual.npy").unlink()  # which a search of all does not need
    done = search(saved["late interaction"], *files, "--plaid", folder, "--json", result)
    assert "not measured: fast-plaid cannot search it: " in " ".join(done.stdout.split())
    assert "fast-plaid cannot search it" in json.loads(result.read_text())["plaid"]["not_searched"]
    merge_chunks(folder / "fast_plaid_index")
    search(saved["late interaction"], *files, "--plaid", folder, "--run", tmp_path / "run", "--json", result)
    said = "it is of a newer fast-plaid; with fast-plaid 1.4.7 or newer it can be searched"
    assert json.loads(result.read_text())["plaid"]["not_searched"] == said
    assert all(len(scores) == 148 for scores in read_run(tmp_path / "run").values())


def test_an_index_of_something_else_is_refused(saved, files, encoder, tmp_path):
    other, folder = tmp_path / "sparse", tmp_path / "index"
    name = build_sparse_encoder(other, encoder("bert"))
    search(name, *files, "--index", folder)
    # Another kind of model, and other weights under the same name.
    for model in (saved["late interaction"], name):
        if model == name:
            shutil.rmtree(other)
            build_sparse_encoder(other, encoder("bert"), seed=1)
        done = search(model, *files, "--index", folder, code=2)
        assert f"--index: {folder} was made with another model ({name}, or other weights or settings of " in done.stderr
    # The same weights, but one word has another id.
    shutil.rmtree(other)
    build_sparse_encoder(other, encoder("bert"))
    tokenizer = Path(name, "tokenizer.json").read_text()
    rules = json.loads(tokenizer)
    words = sorted(rules["model"]["vocab"], key=rules["model"]["vocab"].get)[-2:]
    rules["model"]["vocab"] |= dict(zip(words, map(rules["model"]["vocab"].get, words[::-1]), strict=True))
    Path(name, "tokenizer.json").write_text(json.dumps(rules))
    assert f"--index: {folder} was made with another model" in search(name, *files, "--index", folder, code=2).stderr
    corpus = Path(files[1])
    rows = corpus.read_text().splitlines()
    corpus.write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    shutil.rmtree(other)
    build_sparse_encoder(other, encoder("bert"))
    assert f"--index: {folder} was made with another corpus" in search(name, *files, "--index", folder, code=2).stderr
    (folder / "search.json").write_text("{}")
    assert (
        "search.json is damaged, or of another release. Remove"
        in search(name, *files, "--index", folder, code=2).stderr
    )
    done = search(name, *files, "--index", corpus.parent, code=2)
    assert f"--index must be a folder for an index, but {corpus.parent} holds something else." in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_one_command_at_a_time_builds_an_index_and_several_read_it(kind, saved, files, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    with FileLock(folder / index.LOCK_FILE):
        done = search(saved[kind], *files, "--index", folder, code=2)
        assert f"--index: {folder} is being built by another command" in done.stderr
    search(saved[kind], *files, "--index", folder)
    with FileLock(folder / index.LOCK_FILE):
        written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        search(saved[kind], *files, "--index", folder)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_is_named(kind, saved, files, tmp_path):
    folder = tmp_path / "index"
    search(saved[kind], *files, "--index", folder)
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    done = search(saved[kind], *files, "--index", folder, code=2)
    assert done.stderr.startswith("fastmaxsim: --index: ") and str(file) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "Name what to search: --beir FOLDER_OR_NAME, or --corpus and --queries"),
        (["--beir", "DATA", "--queries", "DATA/queries.jsonl"], "Name what to search"),
        (["--corpus", "DATA/corpus.jsonl"], "Name what to search"),
        (["--beir", "DATA", "--split", "dev"], "--beir: the folder DATA must hold qrels/dev.tsv or qrels.tsv."),
        (["--corpus", "DATA/corpus.txt", "--queries", "DATA/queries.jsonl"], "--corpus must be a file that ends in"),
        (["--corpus", "DATA/corpus.jsonl", "--queries", "DATA/none.jsonl"], "--queries cannot be loaded"),
        (
            ["--corpus", "DATA/corpus.jsonl", "--queries", "DATA/spaced.jsonl", "--run", "DATA/run"],
            "--run: ids must have no white space, which separates the columns of a run file, but 'a b' is that of a query.",
        ),
        (["--beir", "DATA", "--run", "DATA"], "--run DATA cannot be written: it is a folder."),
        (["--beir", "DATA", "--json", "DATA"], "--json DATA cannot be written: it is a folder."),
        (["--beir", "DATA", "--run", "DATA/corpus.jsonl"], "--run DATA/corpus.jsonl cannot be written: it is what"),
        (["--beir", "DATA", "--run", "/dev/null"], "--run /dev/null cannot be written: it is no regular file."),
        (["--beir", "DATA", "--json", "DATA/qrels/test.tsv"], "--json DATA/qrels/test.tsv cannot be written: it is in"),
        (
            ["--beir", "DATA", "--json", "MODEL/config.json"],
            "--json MODEL/config.json cannot be written: it is in MODEL",
        ),
        (["--beir", "DATA", "--run", f"DATA/{'x' * 300}"], f"--run DATA/{'x' * 300} cannot be written: File name too"),
        (["--beir", "DATA", "--json", "DATA/../data/run", "--run", "DATA/run"], "--run and --json must be two files."),
        (["--beir", "DATA", "--format", "float16"], "--format is that of token embeddings in an index"),
        (
            ["--beir", "DATA", "--index", "DATA/i", "--format", "int4"],
            "--format must be one of float32, bfloat16, float16, int8, fp8, residual-1, residual-2, residual-4, got int4.",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, said, saved, tmp_path):
    data = write_folder(tmp_path / "data")
    (data / "spaced.jsonl").write_text(json.dumps({"_id": "a b", "text": text(1, 3)}) + "\n")
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}

    def named(text: str) -> str:
        return text.replace("DATA", str(data)).replace("MODEL", saved["sparse"])

    done = search(saved["sparse"], *map(named, arguments), code=2)
    assert done.stderr.startswith(f"fastmaxsim: {named(said)}") and done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    assert not done.stdout and not (data / "run").exists()


@pytest.mark.process
def test_of_two_commands_with_one_run_file_one_is_there_whole(saved, files, tmp_path):
    run, alone = tmp_path / "run", [tmp_path / "3", tmp_path / "5"]
    for file in alone:
        search(saved["sparse"], *files, "--k", file.name, "--run", file)
    commands = [
        [sys.executable, "-m", "pylate_fastmaxsim.cli", "search", saved["sparse"], *files, "--run", str(run), "--k", k]
        for k in ("3", "5")
    ]
    started = [subprocess.Popen([*each, "--batch-size", "8"], stdout=subprocess.DEVNULL) for each in commands]
    assert [process.wait(120) for process in started] == [0, 0]
    assert run.read_bytes() in [file.read_bytes() for file in alone]


@pytest.mark.e2e  # ranx compiles for seconds
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_those_of_the_evaluation(kind, saved, tmp_path):
    folder = write_folder(tmp_path / "data")
    run, result = tmp_path / "run.trec", tmp_path / "result.json"
    done = search(saved[kind], "--beir", folder, "--run", run, "--json", result)
    metrics = json.loads(result.read_text())["metrics"]
    collection = beir.load_collection(str(folder))
    assert list(read_run(run)) == list(collection.queries)
    model = load_retriever(saved[kind], "cpu")
    expected = ranking.evaluate_collection(retriever_of(model), collection, batch_size=8)
    assert {name: metrics[name] for name in ranking.METRICS} == pytest.approx(
        {name: expected[name] for name in ranking.METRICS}, abs=1e-9
    )
    assert 0 < metrics["ndcg@10"] < 1 and metrics["recall@1000"] > metrics["recall@100"]
    assert f"{metrics['ndcg@10']:.4f}" in done.stdout
    files = [f"--{name}={folder}/{name}.jsonl" for name in ("corpus", "queries")]
    search(saved[kind], *files, "--qrels", folder / "qrels" / "test.tsv", "--k", 10, "--json", result)
    found = json.loads(result.read_text())
    # All queries are searched, and no metric looks further than the results.
    assert found["queries"] == len(collection.queries) + 2
    assert found["metrics"] == pytest.approx({name: metrics[name] for name in ("ndcg@10", "mrr@10")}, abs=1e-9)


@pytest.mark.parametrize("kind", ["sparse", "late interaction"])
def test_a_damaged_index_is_named_repaired_and_gone_on_with(kind, saved, files, small_parts, tmp_path):
    command = [saved[kind], *files, "--index", tmp_path / "index"]
    search(*command, "--run", tmp_path / "before")
    damaged = next((tmp_path / "index").rglob("block-00000002-*" if kind == "sparse" else "values.bin"))
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
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_finds_what_a_cpu_finds(kind, saved, files, tmp_path, monkeypatch):
    folder, run, streamed, cpu = (tmp_path / name for name in ("index", "run", "streamed", "cpu"))
    for options in (["--index", folder, "--run", run], ["--run", streamed], ["--index", folder, "--run", run]):
        search(saved[kind], *files, *options)
    assert_same(run, streamed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    search(saved[kind], *files, "--run", cpu)
    assert_same(run, cpu, rel=1e-3)
