"""Indexes of PLAID that fast-plaid and PyLate write are read where they are, scored as they decompress, and written alike."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fast_plaid.search import FastPlaid

from pylate_fastmaxsim import ResidualCodec, TokenBatch, read_plaid, write_plaid
from pylate_fastmaxsim.retrieval import plaid_writer
from pylate_fastmaxsim.retrieval.search import search
from tests.support import plaid_indexes
from tests.support.plaid_indexes import PLAID, stored_vectors, unit_vectors, write_fast_plaid, write_stanford
from tests.support.residual_codecs import random_codec

# 1,000 tokens for 256 centroids, so that residuals matter; chunks of 25 documents.
LENGTHS = [3, *(1 + 7 * number % 31 for number in range(63))]
CHUNK = 25


def sizes_and_times(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def assert_holds(corpus, documents: list[np.ndarray]) -> None:
    """Vectors, one batch or many, and exhaustive scores are those of the documents."""
    assert len(corpus) == len(documents) and corpus.tokens == sum(map(len, documents))
    for tokens in (10**6, 7):
        batches = [batch.decompress(torch.float64) for batch in corpus.batches(tokens_per_batch=tokens)]
        lengths = torch.cat([batch.lengths for batch in batches]).tolist()
        assert lengths == list(map(len, documents))
        found = torch.cat([batch.values for batch in batches]).numpy()
        np.testing.assert_allclose(found, np.concatenate(documents), rtol=0, atol=1e-6)
    queries = unit_vectors(4, 2, seed=9)
    found = search(TokenBatch.from_list(queries), corpus, k=len(documents))
    for query, row, places in zip(queries, *found, strict=True):
        wanted = [(query.double().numpy() @ d.T).max(axis=1).sum() if len(d) else 0.0 for d in documents]
        np.testing.assert_allclose(row, np.array(wanted)[places], atol=1e-5)
        assert row.tolist() == sorted(row.tolist(), reverse=True) and {*places.tolist()} == {*range(len(documents))}


def assert_near(corpus, own: list[torch.Tensor]) -> None:
    """fast-plaid decompresses in float16."""
    found = torch.cat([batch.decompress().values for batch in corpus.batches()])
    assert torch.allclose(found, torch.cat(own), atol=2e-3)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_an_index_of_fast_plaid_is_read_chunk_by_chunk_and_left_as_it_is(bits, tmp_path):
    index = write_fast_plaid(tmp_path, unit_vectors(*LENGTHS), bits, CHUNK)
    assert (tmp_path / "2.codes.npy").exists()
    before = sizes_and_times(tmp_path)
    corpus = read_plaid(str(tmp_path))
    assert (corpus.format, corpus.dim, corpus.ids) == ("residual", plaid_indexes.DIM, None)
    assert_holds(corpus, stored_vectors(tmp_path))
    assert sizes_and_times(tmp_path) == before
    assert str(tmp_path / "0.residuals.npy") in Path("/proc/self/maps").read_text()
    own = index.get_embeddings(list(range(len(LENGTHS))))
    assert_near(corpus, own)
    picked = [60, 0, 30]
    values, mask = corpus.select(torch.tensor(picked)).decompress().to_padded()
    assert torch.allclose(values[mask], torch.cat([own[number] for number in picked]), atol=2e-3)


def test_documents_that_fast_plaid_adds_and_deletes_count(tmp_path):
    documents = unit_vectors(*LENGTHS)
    index = write_fast_plaid(tmp_path, documents, 2, CHUNK)
    index.update(unit_vectors(3, 4, seed=1), start_from_scratch=0)  # kept in a buffer of its own too
    assert_holds(read_plaid(tmp_path), stored_vectors(tmp_path))
    # Far from all centroids, so that it adds some, which it stores in float32.
    far = [torch.nn.functional.normalize(document + 5, dim=-1) for document in unit_vectors(6, 6, seed=2)]
    index.update(far, start_from_scratch=0, buffer_size=3)
    assert np.load(tmp_path / "centroids.npy").dtype == np.float32
    lengths = [*LENGTHS, 3, 4, 6, 6]
    deleted = {0, *range(25, 50), 67}  # one chunk as a whole
    index.delete(sorted(deleted))
    corpus = read_plaid(tmp_path)
    assert_holds(corpus, stored_vectors(tmp_path))
    kept = [lengths[number] for number in range(68) if number not in deleted]
    assert torch.cat([batch.lengths for batch in corpus.batches()]).tolist() == kept
    assert_near(corpus, index.get_embeddings(list(range(len(kept)))))
    index.delete(list(range(len(kept))))
    assert len(read_plaid(tmp_path)) == 0


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_files_of_all_chunks_that_fast_plaid_1_7_writes_are_read(bits, tmp_path):
    index = write_fast_plaid(tmp_path, unit_vectors(*LENGTHS), bits, CHUNK)
    index.delete([3, *range(25, 50)])  # a chunk as a whole, which keeps files of its own, without a row
    index.update(unit_vectors(3, seed=1), start_from_scratch=0)  # rows of no document behind it
    expected = stored_vectors(tmp_path)
    plaid_indexes.merge_chunks(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.codes.npy")) == ["1.codes.npy"]
    before = sizes_and_times(tmp_path)
    assert_holds(read_plaid(tmp_path), expected)
    assert sizes_and_times(tmp_path) == before
    assert str(tmp_path / "merged_residuals.npy") in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not hasattr(FastPlaid, "freeze"), reason="needs fast-plaid 1.7: PyLate pins an older one")
def test_what_the_newest_fast_plaid_writes_is_read(tmp_path):
    """The release itself, of whose files ``merge_chunks`` writes the like elsewhere."""
    documents = unit_vectors(*LENGTHS)
    index = write_fast_plaid(tmp_path, documents, 4, CHUNK)
    index.delete([3, 40])
    # It merges chunks when it loads an index.
    index.search(torch.stack(unit_vectors(4)), top_k=3, show_progress=False)
    assert (tmp_path / "merged_codes.npy").exists()
    kept = torch.cat([each for place, each in enumerate(documents) if place not in (3, 40)])
    found = torch.cat([batch.decompress().values for batch in read_plaid(tmp_path).batches()])
    assert torch.nn.functional.cosine_similarity(found, kept).min() > 0.9


def test_an_index_of_pylate_has_its_ids(tmp_path):
    index = PLAID(str(tmp_path), "index", nbits=2, device="cpu", show_progress=False)
    names = [f"d{number}" for number in range(len(LENGTHS))]
    index.add_documents(names, unit_vectors(*LENGTHS))
    folder = tmp_path / "index"
    assert read_plaid(folder).ids == read_plaid(folder / "fast_plaid_index").ids == names
    index.remove_documents(["d0", "d7"])
    index.add_documents(["new"], unit_vectors(2, seed=3))
    corpus = read_plaid(folder)
    assert corpus.ids == [name for name in names if name not in ("d0", "d7")] + ["new"]
    assert_holds(corpus, stored_vectors(folder / "fast_plaid_index"))
    query = unit_vectors(3, seed=4)
    scores, positions = search(TokenBatch.from_list(query), corpus, k=len(corpus))
    scores = {corpus.ids[p]: s for p, s in zip(positions[0].tolist(), scores[0].tolist(), strict=True)}
    own = {result["id"]: result["score"] for result in index(query, k=len(corpus))[0]}
    assert len(own) > 30 and own == pytest.approx({name: scores[name] for name in own}, abs=0.02)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_what_is_written_is_what_fast_plaid_writes_with_the_same_codec(bits, tmp_path, monkeypatch):
    monkeypatch.setattr(plaid_writer, "TOKENS_PER_CHUNK", 100)
    documents = unit_vectors(*LENGTHS, 0, 5, 0)  # some without a token
    own = write_fast_plaid(tmp_path / "own", documents, bits, CHUNK)
    codec = read_plaid(tmp_path / "own").parts[0].format.codec
    names = [f"d{number}" for number in range(len(documents))]

    def batches(held: int) -> list[TokenBatch]:
        return [TokenBatch.from_list(documents[begin : begin + 3]) for begin in range(held, len(documents), 3)]

    corpus = write_plaid(tmp_path / "written", batches, codec, ids=names)
    assert corpus.ids == names and len(corpus.parts) > 5
    assert_holds(corpus, stored_vectors(tmp_path / "written" / "fast_plaid_index"))
    written = FastPlaid(str(tmp_path / "written" / "fast_plaid_index"), device="cpu")
    arrays = [
        {file.stem: np.load(file) for file in (tmp_path / at).glob("[bcim]*.npy")}
        for at in ("own", "written/fast_plaid_index")
    ]
    # fast-plaid looks for the nearest of the centroids in float16, and may take another of two that are as near.
    others = arrays[0]["merged_codes"] != arrays[1]["merged_codes"]
    assert others.sum() <= 2 and (arrays[0]["merged_residuals"] == arrays[1]["merged_residuals"])[~others].all()
    for name in ("centroids", "bucket_cutoffs", *(["ivf", "ivf_lengths"] if not others.any() else [])):
        assert np.array_equal(arrays[0][name], arrays[1][name]) and arrays[0][name].dtype == arrays[1][name].dtype, name
    queries = torch.stack(unit_vectors(*[4] * 5, seed=9))
    results = [index.search(queries, top_k=40, show_progress=False) for index in (own, written)]
    for first, second in zip(*(map(dict, each) for each in results), strict=True):
        both = first.keys() & second.keys()
        assert len(second) == 40 and len(both) > 35
        assert sum(first[each] == second[each] for each in both) >= len(both) - 2
    index = PLAID(str(tmp_path), "written", device="cpu", show_progress=False)
    assert [each["id"] for each in index(queries, k=40)[0]] == [names[place] for place, _ in results[1][0]]
    # Of a corpus of residual codes the codes are taken as they are.
    again = write_plaid(tmp_path / "again", corpus, ids=names)
    assert_holds(again, stored_vectors(tmp_path / "written" / "fast_plaid_index"))
    index.add_documents(["new"], unit_vectors(6, seed=8)).remove_documents(["d0"])
    assert read_plaid(tmp_path / "written").ids == [*names[1:], "new"]
    assert index(unit_vectors(6, seed=8), k=1)[0][0]["id"] == "new"


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    def refused(folder: str, codec: ResidualCodec | None, sizes: tuple[int, ...] = (3, 4), **named: object) -> str:
        with pytest.raises(ValueError) as raised:
            write_plaid(
                tmp_path / folder, lambda held: [[each] for each in unit_vectors(*sizes)[held:]], codec, **named
            )
        assert "\n" not in str(raised.value)
        return str(raised.value)

    codec = random_codec(plaid_indexes.DIM, 2, centroids=8)
    assert "a function need a codec; ResidualCodec.train makes it of a sample" in refused("new", None)
    assert "got 7 tokens of 2 documents, and 1 ids." in refused("begun", codec, ids=["a"])
    assert "must be tokens" in refused("empty", codec, sizes=(0, 0))
    assert "begun was written from something else" in refused("begun", random_codec(plaid_indexes.DIM, 2, centroids=9))
    assert "the codec is for d = 8" in refused("other", random_codec(8, 2, centroids=8))
    assert len(write_plaid(tmp_path / "begun", lambda held: [[each] for each in unit_vectors(3, 4)[held:]], codec)) == 2
    assert "begun holds an index; choose another folder, or remove it." in refused("begun", codec)


@pytest.mark.parametrize("bits", [2, 4])
def test_an_index_of_stanfords_code_is_read_without_what_pylate_removed(bits, tmp_path):
    folder = write_stanford(tmp_path, unit_vectors(*LENGTHS), bits, removed=[2, 63])
    before = sizes_and_times(folder)
    corpus = read_plaid(folder)  # as that of ColBERT, which knows documents by their numbers
    assert corpus.ids is None
    assert_holds(corpus, stored_vectors(folder))
    assert str(folder / "0.residuals.pt") in Path("/proc/self/maps").read_text()
    names = {number: f"d{number}" for number in range(64) if number not in (2, 63)}
    (folder / "plaid_ids_to_documents_ids.pkl").write_bytes(pickle.dumps(names))
    corpus = read_plaid(folder)
    assert corpus.ids == list(names.values())
    assert_holds(corpus, [d for d in stored_vectors(folder) if len(d)])
    assert before.items() <= sizes_and_times(folder).items()


@pytest.fixture(scope="module")
def of_two_bits(tmp_path_factory) -> Path:
    write_fast_plaid(folder := tmp_path_factory.mktemp("index"), unit_vectors(*LENGTHS), 2, CHUNK)
    return folder


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


IDS, UNKNOWN = "plaid_ids_to_documents_ids.pkl", "FOLDER has a layout that is not known"
KNOWN = "known are fast-plaid 1.4.6 to 1.7.0 and Stanford's ColBERT."


def damage(file: Path, change: object) -> None:
    """None removes a file, a number cuts it, and a mapping changes keys of metadata; all else is written in its place."""
    if isinstance(change, int):
        change = file.read_bytes()[:change]
    if file.name == "metadata.json" and isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change).encode()
    if change is None:
        file.unlink()
    elif isinstance(change, np.ndarray):
        np.save(file, change)
    else:
        file.write_bytes(change if isinstance(change, bytes) else pickle.dumps(change))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("metadata.json", None, "FOLDER must hold an index of PLAID, with metadata.json in it"),
        ("centroids.npy", None, f"{UNKNOWN}, without centroids.npy or centroids.pt; {KNOWN}"),
        ("0.codes.npy", None, f"{UNKNOWN}, without 0.codes.npy; {KNOWN}"),
        ("metadata.json", b"[]", f"{UNKNOWN}, without nbits and num_chunks in metadata.json; {KNOWN}"),
        ("metadata.json", {"frozen": True, "num_chunks": 4}, "FOLDER/doclens.3.json is missing; build the index anew."),
        ("metadata.json", {"nbits": 8}, "must say nbits, 1, 2 or 4, and num_chunks, from 1, but says 8 and 3."),
        ("metadata.json", {"nbits": 4}, "bucket_weights.npy must hold torch.float16 or torch.float32 [16], as"),
        ("1.codes.npy", None, "FOLDER/1.codes.npy is missing; build the index anew."),
        ("0.residuals.npy", -9, "FOLDER/0.residuals.npy cannot be read (mmap length is greater than file size)"),
        ("0.codes.npy", b"none", "FOLDER/0.codes.npy cannot be read"),
        ("0.codes.npy", np.zeros(3), "0.codes.npy must hold torch.int32 or torch.int64 [378], as other files"),
        ("0.residuals.npy", np.zeros((378, 9), np.uint8), "0.residuals.npy must hold torch.uint8 [378, 8]"),
        ("bucket_weights.npy", np.full(4, np.nan, np.float32), "FOLDER must hold a codec that can be used; R"),
        ("doclens.0.json", b"[3, -1, 16]", "FOLDER/doclens.0.json must be a list of integers from 0"),
        ("doclens.0.json", b"[3, 4]", "FOLDER/0.codes.npy must hold torch.int32 or torch.int64 [7], as other"),
        (IDS, {0: "a"}, f"FOLDER/{IDS} must hold the ids of the 64 documents of the index, but holds 1"),
        (IDS, [], f"FOLDER/{IDS} must hold a mapping from numbers to ids"),
        (IDS, {0: Evil()}, "cannot be read (ids must be strings or integers, but it names posix.system)"),
    ],
)
def test_what_is_damaged_or_unknown_is_one_sentence(name, change, said, of_two_bits, tmp_path):
    folder = shutil.copytree(of_two_bits, tmp_path / "index")
    damage(folder / name, change)
    with pytest.raises(ValueError) as raised:
        read_plaid(folder)
    assert str(raised.value).startswith("read_plaid: ") and said.replace("FOLDER", str(folder)) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_codes_of_another_index_are_refused_when_they_are_read(device, of_two_bits, tmp_path):
    folder = shutil.copytree(of_two_bits, tmp_path / "index")
    codes = np.load(folder / "1.codes.npy")
    codes[-1] = 256
    np.save(folder / "1.codes.npy", codes)
    for read in (lambda corpus: list(corpus.batches(device)), lambda corpus: corpus.select([*range(30, 50)], device)):
        with pytest.raises(ValueError, match="codes of the documents of .*doclens.1.json must be from 0 to 255"):
            read(read_plaid(folder))
    assert len(next(read_plaid(folder).batches("cpu"))) == CHUNK


@pytest.mark.cuda
def test_a_gpu_scores_an_index_as_a_cpu_does(of_two_bits):
    corpus, queries = read_plaid(of_two_bits), unit_vectors(4, 2, seed=9)
    expected = search(TokenBatch.from_list(queries), corpus, k=64)
    found = search(TokenBatch.from_list([query.cuda() for query in queries]), corpus, k=64)
    assert torch.allclose(found.scores.cpu(), expected.scores, atol=1e-4)
