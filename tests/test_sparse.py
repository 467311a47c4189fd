import copy
import gzip
import json
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch

from pylate_fastmaxsim import SparseBatch, reference
from tests.support.sparse_vectors import assert_same, sorted_scores, sparse_vectors


def assert_equal(actual: SparseBatch, expected: SparseBatch) -> None:
    assert actual.vocabulary == expected.vocabulary
    assert_same(*([batch.offsets, batch.terms, batch.weights] for batch in (actual, expected)))


def checked(batch: SparseBatch) -> SparseBatch:
    return SparseBatch(batch.offsets, batch.terms, batch.weights, batch.vocabulary)


@pytest.fixture
def batch() -> SparseBatch:
    return sparse_vectors(30, 40, seed=0)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "lil", "dok", "bsr", "dia"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_scipy_matrices_come_and_go(batch, layout, kind):
    matrix = getattr(scipy.sparse, f"{layout}_{kind}")(batch.to_scipy())
    assert_equal(checked(SparseBatch.from_scipy(matrix)), batch)
    assert_equal(checked(SparseBatch.from_scipy(matrix.astype(np.float64))), batch)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.strided])
def test_torch_tensors_of_each_layout_and_dtype(batch, layout):
    """float64 and bfloat16 become float32; float16 stays, since its products are as exact and take half the memory."""
    dense = 1.1 * torch.from_numpy(batch.to_scipy().toarray())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32):
        values = dense.to(dtype)
        kept = torch.float16 if dtype == torch.float16 else torch.float32
        tensor = values if layout == torch.strided else values.to_sparse(layout=layout)
        made = checked(SparseBatch.from_torch(tensor))
        assert made.dtype == kept
        assert np.array_equal(made.to_scipy().toarray(), values.to(kept).float().numpy())


def test_a_vector_is_a_batch_of_one_and_needs_no_gradient():
    vector = torch.tensor([0.0, 2.0, 0.0, 1.0], requires_grad=True)
    for tensor in (vector, vector.to_sparse()):
        assert_equal(SparseBatch.from_torch(tensor), SparseBatch.from_lists([[(1, 2.0), (3, 1.0)]], 4))
    assert not direct(weights=WEIGHTS.clone().requires_grad_()).weights.requires_grad


def test_repeated_terms_are_added_in_float64_and_rounded_once_and_zeros_dropped(tmp_path):
    entries = [(2, 1.0), (0, 0.0), (2, 2.0**-24), (2, 2.0**-24)]
    terms, weights = map(np.array, zip(*entries, strict=True))
    places, weights = np.stack([0 * terms, terms]), weights.astype(np.float32)
    pairs = ", ".join(f'"{term}": {weight}' for term, weight in entries)
    (tmp_path / "file.jsonl").write_text(f'{{"id": "1", "vector": {{{pairs}}}}}')
    for made in (
        SparseBatch.from_lists([entries], 3),
        SparseBatch.from_scipy(scipy.sparse.coo_array((weights, tuple(places)), shape=(1, 3))),
        SparseBatch.from_scipy(scipy.sparse.csr_array((weights, terms, [0, 4]), shape=(1, 3))),
        SparseBatch.from_torch(torch.sparse_coo_tensor(torch.tensor(places), torch.tensor(weights), (1, 3))),
        SparseBatch.from_jsonl(tmp_path / "file.jsonl", 3),
    ):
        assert (made.terms.tolist(), made.weights.tolist()) == ([2], [1 + 2.0**-23])
    # Rounded to float32 on the way, the sum would be 1 + 2**-11, and then 1 in float16: the nearest is above.
    halves = torch.tensor([1.0, 2.0**-11, 2.0**-24], dtype=torch.float16)
    made = SparseBatch.from_torch(torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), halves, (1, 3)))
    assert made.dtype == torch.float16 and made.weights.tolist() == [1 + 2.0**-10]
    assert len(SparseBatch.from_lists([[(0, 1e-60), (1, -0.0), (2, 0)]], 3).terms) == 0


@pytest.mark.parametrize("vocabulary, dtype", [(1 << 16, torch.uint16), (65_537, torch.int32), (1 << 31, torch.int32)])
def test_terms_are_of_16_bits_where_all_fit(vocabulary, dtype):
    made = checked(SparseBatch.from_lists([[(vocabulary - 1, 1.0), (0, 2.0)]], vocabulary))
    assert made.terms.dtype == dtype and made.terms.long().tolist() == [0, vocabulary - 1]
    assert made.nbytes == 2 * 8 + 2 * made.terms.itemsize + 2 * 4


@pytest.mark.parametrize("vocabulary", [40, 65_537])
def test_rows_are_selected_and_batches_joined_as_in_scipy(vocabulary):
    batch, index = sparse_vectors(20, vocabulary, seed=1), torch.tensor([3, 0, 3, -2, 18])
    assert_equal(checked(batch.select(index)), SparseBatch.from_scipy(batch.to_scipy()[index.numpy()]))
    assert len(batch.select(index[:0])) == 0
    parts = [batch.select(part) for part in torch.arange(20).split([7, 0, 13])]
    assert_equal(checked(SparseBatch.concatenate(parts)), batch)
    assert_equal(batch.to("cpu"), batch)


@pytest.mark.cuda
def test_a_gpu_makes_the_same_batches():
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(size, (3000,), generator=generator) for size in (50, 40)])
    tensor = torch.sparse_coo_tensor(places, torch.rand(3000, generator=generator), (50, 40))
    expected, made = (SparseBatch.from_torch(each) for each in (tensor, tensor.cuda()))
    index = torch.tensor([4, 0, 4])
    assert made.device.type == "cuda"
    assert_equal(checked(made).to("cpu"), expected)
    assert_equal(made.select(index.cuda()).to("cpu"), expected.select(index))
    assert_equal(SparseBatch.concatenate([made, made]).to("cpu"), SparseBatch.concatenate([expected, expected]))
    queries = made.select(index.cuda())
    assert_same(reference.sparse_top(queries, made, 7), sorted_scores(queries, made, 7))


LINES = ['{"id": "a", "vector": {"sea": 1.5, "sky": 0.25}}', '{"id": 7, "contents": "no token", "vector": {}}']
LINES += ["", '{"vector": {"sky": 3}, "id": "c"}']
VECTORS = SparseBatch.from_lists([[(1, 1.5), (0, 0.25)], [], [(0, 3)]], 2)
SEA = {"sky": 0, "sea": 1}


def test_json_lines_from_files_and_folders_plain_and_gzip(tmp_path):
    (tmp_path / "docs01.jsonl").write_text("\n".join(LINES))
    (tmp_path / "docs00.json.gz").write_bytes(gzip.compress("\r\n".join(LINES[:2]).encode()))
    (tmp_path / "README").write_text("no JSON")
    (tmp_path / "bare").write_bytes((tmp_path / "docs00.json.gz").read_bytes())
    assert_equal(SparseBatch.from_jsonl(tmp_path / "docs01.jsonl", SEA), VECTORS)
    first = VECTORS.select(torch.tensor([0, 1]))
    for paths in (str(tmp_path), [tmp_path / "bare", tmp_path / "docs01.jsonl"]):
        assert_equal(SparseBatch.from_jsonl(paths, SEA), SparseBatch.concatenate([first, VECTORS]))
    assert SparseBatch.from_jsonl(tmp_path / "docs01.jsonl", SEA, size=70_000).vocabulary == 70_000
    assert len(SparseBatch.from_jsonl([], SEA)) == 0


@pytest.mark.parametrize(
    ("line", "vocabulary", "message"),
    [
        (LINES[0][:-9], SEA, "not a whole JSON object"),
        (b"\xff\xfe{", SEA, "not a whole JSON object"),
        ('{"id": null, "vector": {"sea": 1}}', SEA, 'must be an object with "id" and "vector"'),
        ('{"id": 1, "vector": [1]}', SEA, 'must be an object with "id" and "vector"'),
        ('{"id": 1, "vector": {"lake": 1}}', SEA, "the token 'lake' is not in the vocabulary"),
        ('{"id": 1, "vector": {"sea": 1}}', 2, "keys must be numbers of terms from 0 to 1, got 'sea'"),
        ('{"id": 1, "vector": {"sea": "1"}}', SEA, "weights must be numbers"),
        ('{"id": 1, "vector": {"sea": -1}}', SEA, "weights must be at least 0 and finite in float32, got -1"),
        ('{"id": 1, "vector": {"sky": 2, "sea": NaN}}', SEA, "at least 0 and finite in float32, got nan"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, vocabulary, message):
    good = b'{"id": 0, "vector": {}}\n\n'
    (tmp_path / "file.jsonl").write_bytes(good + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=rf"^SparseBatch.from_jsonl: \S+file.jsonl, line 3: .*{message}"):
        SparseBatch.from_jsonl(tmp_path / "file.jsonl", vocabulary)


def test_a_truncated_or_damaged_gzip_file_is_named(tmp_path):
    lines = [json.dumps({"id": i, "vector": {str(j): (i * j) % 17 for j in range(50)}}) for i in range(200)]
    whole = gzip.compress("\n".join(lines).encode())
    for damaged in (whole[: len(whole) // 2], b"", b"plain", whole[:500] + bytes(8) + whole[508:]):
        (tmp_path / "file.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"file.jsonl.gz, line \d+: (the gzip file is truncated|not a whole JSON)"):
            SparseBatch.from_jsonl(tmp_path / "file.jsonl.gz", 50)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*missing.jsonl"):
        SparseBatch.from_jsonl(tmp_path / "missing.jsonl", 3)
    with pytest.raises(ValueError, match="holds no file that ends in .jsonl"):
        SparseBatch.from_jsonl(tmp_path, 3)
    with pytest.raises(ValueError, match="size must be at least 2, as many terms as vocabulary has, got 1"):
        SparseBatch.from_jsonl([], SEA, size=1)


def test_npz_files(tmp_path, batch):
    scipy.sparse.save_npz(tmp_path / "docs.npz", batch.to_scipy())
    assert_equal(SparseBatch.from_npz(tmp_path / "docs.npz"), batch)
    whole = (tmp_path / "docs.npz").read_bytes()
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    for damaged in (whole[:-100], b"", b"text", (tmp_path / "other.npz").read_bytes()):
        (tmp_path / "docs.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"docs.npz must be a file of scipy.sparse.save_npz, but is another or"):
            SparseBatch.from_npz(tmp_path / "docs.npz")


ONE, TERMS, WEIGHTS = torch.tensor([0, 2]), torch.tensor([1, 3], dtype=torch.int32), torch.tensor([1.0, 2.0])


def direct(**changes: object) -> SparseBatch:
    return SparseBatch(**{"offsets": ONE, "terms": TERMS, "weights": WEIGHTS, "vocabulary": 4, **changes})


LISTS, TORCH, SCIPY = SparseBatch.from_lists, SparseBatch.from_torch, SparseBatch.from_scipy
OUTSIDE = torch.sparse_coo_tensor([[3], [0]], [1.0], (2, 2), check_invariants=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: direct(offsets=[0, 2]), r"offsets must be a tensor int64 \[N \+ 1\], got list"),
        (lambda: direct(offsets=ONE.int()), r"offsets must be int64 \[N \+ 1\], got torch.int32"),
        (lambda: direct(terms=TERMS.long()), r"terms must be int32 or uint16 \[P\], got torch.int64"),
        (lambda: direct(weights=WEIGHTS.double()), r"weights must be float32 or float16 \[P\], got torch.float64"),
        (lambda: direct(weights=WEIGHTS.to("meta")), "weights must be on cpu, as the rest, got meta"),
        (lambda: direct(weights=WEIGHTS[:1]), r"terms and weights both \[P\], got shapes \(2,\), \(2,\) and \(1,\)"),
        (lambda: direct(offsets=torch.tensor([0, 1])), "offsets must rise from 0 to P = 2, got 0 to 1"),
        (lambda: direct(offsets=torch.tensor([0, 2, 1, 2])), "got 0 to 2 with a step below 0"),
        (lambda: direct(vocabulary=3), r"terms must be from 0 to 2, got 3 \(vector 0, term 3\)"),
        (lambda: direct(terms=-TERMS), r"terms must be from 0 to 3, got -1 \(vector 0"),
        (lambda: direct(terms=TERMS.flip(0)), r"terms must ascend within a vector and not repeat, got 1 \(vector 0"),
        (lambda: direct(terms=TERMS[[1, 1]]), "terms must ascend within a vector and not repeat, got 3"),
        (lambda: direct(weights=torch.tensor([1.0, 0.0])), r"weights must be finite and above 0, got 0.0 \(vector 0, term 3\)"),
        (lambda: direct(vocabulary=0), "vocabulary must be at least 1, got 0"),
        (lambda: direct(vocabulary=(1 << 31) + 1), "vocabulary must be at most 2147483648, got 2147483649"),
        # The sum is positive.
        (lambda: LISTS([[(0, 2), (0, -1)]], 2), r"at least 0 and finite in float32, got -1.0 \(vector 0, term 0\)"),
        (lambda: LISTS([[(0, 1e39)]], 2), "at least 0 and finite in float32, got inf"),
        (lambda: LISTS([[(0, 3e38), (0, 3e38)]], 2), "at least 0 and finite in float32, got inf"),
        (lambda: LISTS([[(2, 1)]], 2), r"terms must be from 0 to 1, the vocabulary, got 2 \(vector 0, term 2\)"),
        (lambda: LISTS([[(0.5, 1)]], 2), "terms must be integers, got float64"),
        (lambda: LISTS([[(0, "1")]], 2), "weights must be real numbers, got <U1"),
        (lambda: LISTS([(0, 1.0)], 2), r"each of rows must be a list of pairs \(term, weight\)"),
        (lambda: TORCH([torch.ones(2)]), r"got list; a list of vectors is torch.stack\(vectors\)"),
        (lambda: TORCH(torch.ones(1, 2, 2)), r"tensor must be \[N, vocabulary\], got shape \(1, 2, 2\)"),
        (lambda: TORCH(torch.ones(2, 2).to_sparse(1)), r"tensor must be \[N, vocabulary\], got shape \(2, 2\)"),
        (lambda: TORCH(torch.ones(2, 2).to_sparse_bsr((1, 1))), "must be COO, CSR, CSC or dense, got torch.sparse_bsr"),
        (lambda: TORCH(torch.ones(2, 2, dtype=torch.cfloat)), "weights must be real numbers, got torch.complex64"),
        (lambda: TORCH(OUTSIDE), "entries must be of vectors 0 to 1, got 3 to 3"),
        (lambda: TORCH(torch.tensor([[1.0, torch.nan]])), r"finite in float32, got nan \(vector 0, term 1\)"),
        (lambda: TORCH(torch.tensor([[1.0, torch.inf]]).half()), "at least 0 and finite in float16, got inf"),
        (lambda: SCIPY(np.ones((2, 2))), "matrix must be a sparse matrix of SciPy, got ndarray"),
        (lambda: SCIPY(scipy.sparse.coo_array(np.ones(2))), r"matrix must be \[N, vocabulary\], got shape \(2,\)"),
        (lambda: SCIPY(scipy.sparse.csr_array([[1j]])), "weights must be real numbers, got complex128"),
        (lambda: SparseBatch.concatenate([]), "an empty list has no vocabulary"),
        (lambda: SparseBatch.concatenate([direct(), direct(vocabulary=5)]), "vocabulary and the device of the first, got"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises((TypeError, ValueError), match=rf"^SparseBatch(.\w+)?: .*{message}"):
        make()


@pytest.mark.parametrize("indptr", [[0, 4000, 2, 3], [0, -5, 2, 3], [1, 1, 2, 3], [0, 1, 2, 1 << 30], [0, 3, 2, 3]])
@pytest.mark.parametrize("layout", ["csr", "csc", "npz"])
def test_pointers_that_lead_elsewhere_are_refused(indptr, layout, tmp_path):
    matrix = scipy.sparse.eye_array(3, dtype=np.float32, format=layout.replace("npz", "csr"))
    matrix.indptr = np.array(indptr, np.int32)
    if layout == "npz":
        scipy.sparse.save_npz(tmp_path / "m.npz", matrix)
    with pytest.raises(ValueError, match=r"^SparseBatch.from_"):
        SparseBatch.from_npz(tmp_path / "m.npz") if layout == "npz" else SparseBatch.from_scipy(matrix)


@pytest.mark.parametrize("vocabulary", [30, 1 << 20])
def test_batches_are_pickled_and_copied(vocabulary):
    batch = SparseBatch.from_lists([[(3, 1.0)], []], vocabulary)
    for again in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert_equal(again, batch)
