"""Sparse vectors from everything that holds them, what is refused, and the definition of search against SciPy."""

from __future__ import annotations

import copy
import gzip
import json
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import SparseBatch, reference
from tests.support.sparse_vectors import scipy_products, sorted_scores

PARTS = ("offsets", "terms", "weights")
VOCABULARIES = (1, 16, 65_536, 65_537, 1 << 31)
# The square of a tiny weight is 0 in float32.
DRAWN_WEIGHTS = {"one": [1.0], "few": [0.0, 0.5, 1.0, 2.0], "tiny": [2.0**-140, 2.0**-100, 1.0], "any": None}


def random_batch(
    generator: np.random.Generator, count: int, vocabulary: int, most: int = 12, weights: str = "any"
) -> SparseBatch:
    """Vectors of 0 to ``most`` entries over at most 60 terms, the first and the last of the vocabulary among them."""
    terms = np.linspace(0, vocabulary - 1, min(vocabulary, 60)).astype(np.int64)
    rows = []
    for size in generator.integers(0, min(most, len(terms)) + 1, count):
        chosen = DRAWN_WEIGHTS[weights]
        # Over so many orders of magnitude that sums in float64 depend on their order.
        values = generator.lognormal(sigma=5, size=size) if chosen is None else generator.choice(chosen, size)
        rows.append(list(zip(generator.choice(terms, size, replace=False).tolist(), values.tolist(), strict=True)))
    return SparseBatch.from_lists(rows, vocabulary)


@st.composite
def problems(draw: st.DrawFn, most_documents: int = 40) -> tuple[SparseBatch, SparseBatch, int]:
    """Queries, documents and k: empty vectors, masses of equal scores, scores that round to 0, k above the number of documents."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary, weights = draw(st.sampled_from(VOCABULARIES)), draw(st.sampled_from(sorted(DRAWN_WEIGHTS)))
    counts = draw(st.integers(0, 6)), draw(st.integers(0, most_documents))
    queries, documents = (
        random_batch(generator, count, vocabulary, draw(st.integers(0, 12)), weights) for count in counts
    )
    if draw(st.booleans()):
        everywhere = SparseBatch.from_lists([[(vocabulary - 1, 1.0)]] * len(documents), vocabulary)
        both = documents.to_scipy() + everywhere.to_scipy()
        documents = SparseBatch.from_scipy(both)
    return queries, documents, draw(st.integers(1, most_documents + 5))


def assert_equal(actual: SparseBatch, expected: SparseBatch) -> None:
    assert actual.vocabulary == expected.vocabulary
    for part in PARTS:
        one, other = getattr(actual, part), getattr(expected, part)
        assert one.dtype == other.dtype and torch.equal(one, other), part


def checked(batch: SparseBatch) -> SparseBatch:
    """The batch again through the constructor, which checks all that the others promise."""
    return SparseBatch(batch.offsets, batch.terms, batch.weights, batch.vocabulary)


@pytest.fixture
def batch() -> SparseBatch:
    return random_batch(np.random.default_rng(0), 30, 40, weights="few")


# ---- conversions: each format gives the same batch, so that one test of search stands for all of them


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
    """What ``encode`` returns of a single text; an output that still requires a gradient is taken as numbers."""
    vector = torch.tensor([0.0, 2.0, 0.0, 1.0], requires_grad=True)
    for tensor in (vector, vector.to_sparse()):
        assert_equal(SparseBatch.from_torch(tensor), SparseBatch.from_lists([[(1, 2.0), (3, 1.0)]], 4))


def test_repeated_terms_are_added_in_float64_and_rounded_once(tmp_path):
    """In float32 one after the other, and also where SciPy or torch add up repeats themselves, the sum would be 1."""
    entries = [(2, 1.0), (0, 0.0), (2, 2.0**-24), (2, 2.0**-24)]
    rows, terms = torch.zeros(4, dtype=torch.int64), torch.tensor([term for term, _ in entries])
    weights = torch.tensor([weight for _, weight in entries])
    coordinates = scipy.sparse.coo_array((weights.numpy(), (rows.numpy(), terms.numpy())), shape=(1, 3))
    rows_of_scipy = scipy.sparse.csr_array((weights.numpy(), terms.numpy(), [0, 4]), shape=(1, 3))
    pairs = ", ".join(f'"{term}": {weight}' for term, weight in entries)
    (tmp_path / "file.jsonl").write_text(f'{{"id": "1", "vector": {{{pairs}}}}}')
    for made in (
        SparseBatch.from_lists([entries], 3),
        SparseBatch.from_scipy(coordinates),
        SparseBatch.from_scipy(rows_of_scipy),
        SparseBatch.from_torch(torch.sparse_coo_tensor(torch.stack([rows, terms]), weights, (1, 3))),
        SparseBatch.from_jsonl(tmp_path / "file.jsonl", 3),
    ):
        assert (made.terms.tolist(), made.weights.tolist()) == ([2], [1 + 2.0**-23])
    # Rounded to float32 on the way, the sum would be 1 + 2**-11, and then 1 in float16: the nearest is above.
    halves = torch.tensor([1.0, 2.0**-11, 2.0**-24], dtype=torch.float16)
    made = SparseBatch.from_torch(torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), halves, (1, 3)))
    assert made.dtype == torch.float16 and made.weights.tolist() == [1 + 2.0**-10]


def test_weights_that_round_to_0_are_dropped():
    """Left in, a document would share a term with a query by a weight of 0."""
    assert len(SparseBatch.from_lists([[(0, 1e-60), (1, -0.0), (2, 0)]], 3).terms) == 0


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(65_536, torch.uint16), (65_537, torch.int32), (1 << 31, torch.int32)]
)
def test_terms_are_of_16_bits_where_all_fit(vocabulary, dtype):
    made = checked(SparseBatch.from_lists([[(vocabulary - 1, 1.0), (0, 2.0)]], vocabulary))
    assert made.terms.dtype == dtype and made.terms.long().tolist() == [0, vocabulary - 1]
    assert made.nbytes == 2 * 8 + 2 * made.terms.itemsize + 2 * 4


@pytest.mark.parametrize("vocabulary", [40, 65_537])
def test_rows_are_selected_and_batches_joined_as_in_scipy(vocabulary):
    batch = random_batch(np.random.default_rng(1), 20, vocabulary)
    index = torch.tensor([3, 0, 3, -2, 18])
    assert batch.offsets.diff()[index].min() > 0
    assert_equal(checked(batch.select(index)), SparseBatch.from_scipy(batch.to_scipy()[index.numpy()]))
    assert len(batch.select(index[:0])) == 0
    parts = [batch.select(part) for part in torch.arange(20).split([7, 0, 13])]
    assert_equal(checked(SparseBatch.concatenate(parts)), batch)
    assert_equal(batch.to("cpu"), batch)


def test_joined_batches_widen_without_loss():
    """uint16 beside int32 would fail in ``torch.cat``, or give negative terms if their bits were joined."""
    one = torch.tensor([0, 1])
    narrow = SparseBatch(
        one, torch.tensor([65_535], dtype=torch.uint16), torch.tensor([0.5], dtype=torch.float16), 65_536
    )
    wide = SparseBatch(one, torch.tensor([1], dtype=torch.int32), torch.tensor([0.1]), 65_536)
    both = checked(SparseBatch.concatenate([narrow, wide]))
    assert (both.terms.tolist(), both.terms.dtype, both.dtype) == ([65_535, 1], torch.int32, torch.float32)


@pytest.mark.cuda
def test_a_gpu_makes_the_same_batches():
    """PyTorch has few operators on uint16 there, and adds in any order."""
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(size, (3000,), generator=generator) for size in (50, 40)])
    tensor = torch.sparse_coo_tensor(places, torch.rand(3000, generator=generator), (50, 40))
    expected, made = (SparseBatch.from_torch(each) for each in (tensor, tensor.cuda()))
    index = torch.tensor([4, 0, 4])
    assert made.device.type == "cuda"
    assert_equal(checked(made).to("cpu"), expected)
    assert_equal(made.select(index.cuda()).to("cpu"), expected.select(index))
    assert_equal(SparseBatch.concatenate([made, made]).to("cpu"), SparseBatch.concatenate([expected, expected]))
    queries, k = made.select(index.cuda()), 7
    for one, other in zip(reference.sparse_top(queries, made, k), sorted_scores(queries, made, k), strict=True):
        assert torch.equal(one.cpu(), other)


def test_what_a_sparse_encoder_returns(encoder):
    """Against the host itself: its sparse, dense and single results, and its similarity."""
    from tests.support.sparse_encoders import load_sparse

    model = load_sparse(encoder("bert"), max_active_dims=None)
    texts = ["Why is the sky blue?", "Bees dance.", "Bread rises when yeast turns sugar into gas."]
    sparse, dense = model.encode(texts), model.encode(texts, convert_to_sparse_tensor=False)
    made = checked(SparseBatch.from_torch(sparse))
    assert len(made.terms) > 0 and np.array_equal(made.to_scipy().toarray(), dense.numpy())
    assert_equal(SparseBatch.from_torch(dense), made)
    single = SparseBatch.from_torch(model.encode(texts[1]))
    np.testing.assert_allclose(single.to_scipy().toarray(), dense[1:2].numpy(), rtol=1e-5, atol=1e-6)
    scores = reference.sparse_scores(made, made).float()
    torch.testing.assert_close(scores, model.similarity(sparse, sparse).to_dense(), rtol=1e-5, atol=1e-5)


# ---- files


LINES = [
    '{"id": "a", "contents": "", "vector": {"sea": 1.5, "sky": 0.25}}',
    '{"id": 7, "contents": "no token", "vector": {}}',
    "",
    '{"vector": {"sky": 3}, "id": "c"}',
]
VECTORS = SparseBatch.from_lists([[(1, 1.5), (0, 0.25)], [], [(0, 3)]], 2)
SEA = {"sky": 0, "sea": 1}


def test_json_lines_from_files_and_folders_plain_and_gzip(tmp_path):
    """A folder is read in the order of names, without what is no JSON; gzip is known by its content too."""
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
        ("[1]", SEA, 'must be an object with "id" and "vector"'),
        ('{"vector": {"sea": 1}}', SEA, 'must be an object with "id" and "vector"'),
        ('{"id": null, "vector": {"sea": 1}}', SEA, 'must be an object with "id" and "vector"'),
        ('{"id": 1, "vector": [1]}', SEA, 'must be an object with "id" and "vector"'),
        ('{"id": 1, "vector": {"lake": 1}}', SEA, "the token 'lake' is not in the vocabulary"),
        ('{"id": 1, "vector": {"2": 1}}', 2, "keys must be numbers of terms from 0 to 1, got '2'"),
        ('{"id": 1, "vector": {"sea": 1}}', 2, "keys must be numbers of terms from 0 to 1, got 'sea'"),
        ('{"id": 1, "vector": {"sea": "1"}}', SEA, "weights must be numbers"),
        ('{"id": 1, "vector": {"sea": -1}}', SEA, "weights must be at least 0 and finite in float32, got -1"),
        ('{"id": 1, "vector": {"sky": 2, "sea": NaN}}', SEA, "at least 0 and finite in float32, got nan"),
        ('{"id": 1, "vector": {"sea": 1e39}}', SEA, "at least 0 and finite in float32, got 1e"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, vocabulary, message):
    good = b'{"id": 0, "vector": {}}\n\n'
    (tmp_path / "file.jsonl").write_bytes(good + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=rf"^SparseBatch.from_jsonl: \S+file.jsonl, line 3: .*{message}"):
        SparseBatch.from_jsonl(tmp_path / "file.jsonl", vocabulary)


def test_a_truncated_or_damaged_gzip_file_is_named(tmp_path):
    """Python's own error names neither file nor line, and an empty file would be a collection without documents."""
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


# ---- what is refused

ONE, TERMS, WEIGHTS = torch.tensor([0, 2]), torch.tensor([1, 3], dtype=torch.int32), torch.tensor([1.0, 2.0])


def direct(**changes: object) -> SparseBatch:
    return SparseBatch(**{"offsets": ONE, "terms": TERMS, "weights": WEIGHTS, "vocabulary": 4, **changes})


def test_weights_that_are_learned_are_taken_without_their_gradient():
    learned = direct(weights=WEIGHTS.clone().requires_grad_())
    assert not learned.weights.requires_grad and learned.to_scipy().nnz == 2


LISTS, TORCH, SCIPY, JOIN = (
    SparseBatch.from_lists,
    SparseBatch.from_torch,
    SparseBatch.from_scipy,
    SparseBatch.concatenate,
)
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
        (lambda: direct(weights=torch.tensor([1.0, torch.inf])), "weights must be finite and above 0, got inf"),
        (lambda: direct(vocabulary=0), "vocabulary must be at least 1, got 0"),
        (lambda: direct(vocabulary=(1 << 31) + 1), "vocabulary must be at most 2147483648, got 2147483649"),
        (lambda: direct(vocabulary=2.5), "vocabulary must be an integer, at least 1, got 2.5"),
        (lambda: LISTS([[(0, 1)], [(1, -0.5)]], 2), r"at least 0 and finite in float32, got -0.5 \(vector 1, term 1\)"),
        # The sum is positive.
        (lambda: LISTS([[(0, 2), (0, -1)]], 2), r"at least 0 and finite in float32, got -1.0 \(vector 0, term 0\)"),
        (lambda: LISTS([[(0, 1e39)]], 2), "at least 0 and finite in float32, got inf"),
        (lambda: LISTS([[(0, 3e38), (0, 3e38)]], 2), "at least 0 and finite in float32, got inf"),
        (lambda: LISTS([[(2, 1)]], 2), r"terms must be from 0 to 1, the vocabulary, got 2 \(vector 0, term 2\)"),
        (lambda: LISTS([[(0.5, 1)]], 2), "terms must be integers, got float64"),
        (lambda: LISTS([[(0, "1")]], 2), "weights must be real numbers, got <U1"),
        (lambda: LISTS([[(0, 10**400)]], 2), "weights must be real numbers, got object"),
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
        (lambda: JOIN([]), "an empty list has no vocabulary"),
        (lambda: JOIN([direct(), direct(vocabulary=5)]), "vocabulary and the device of the first, got"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises((TypeError, ValueError), match=rf"^SparseBatch(.\w+)?: .*{message}"):
        make()


# ---- the definition of search


@given(problem=problems())
@settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=150)
def test_search_is_that_of_scipy_in_float64(problem):
    """Bit by bit, ties and padding too, so that every engine can be held to either."""
    queries, documents, k = *map(checked, problem[:2]), problem[2]
    exact = scipy_products(queries, documents)
    assert np.array_equal(reference.sparse_scores(queries, documents).numpy(), exact)
    scores, positions = reference.sparse_top(queries, documents, k)
    assert scores.dtype == torch.float32 and scores.shape == (len(queries), k)
    for actual, expected in zip((scores, positions), sorted_scores(queries, documents, k), strict=True):
        assert torch.equal(actual, expected)


def test_a_shared_term_counts_even_if_the_score_rounds_to_0():
    """Two documents of score 0: one shares a term, which the score alone does not show."""
    queries = SparseBatch.from_lists([[(0, 2.0**-140)]], 2)
    documents = SparseBatch.from_lists([[(1, 1.0)], [(0, 2.0**-140)]], 2)
    assert reference.sparse_top(queries, documents, 2)[1].tolist() == [[1, -1]]
    assert reference.sparse_top(queries, documents, 2)[0].tolist() == [[0, 0]]


@pytest.mark.parametrize("indptr", [[0, 4000, 2, 3], [0, -5, 2, 3], [1, 1, 2, 3], [0, 1, 2, 1 << 30], [0, 3, 2, 3]])
@pytest.mark.parametrize("layout", ["csr", "csc", "npz"])
def test_pointers_that_lead_elsewhere_are_refused(indptr, layout, tmp_path):
    """Before SciPy writes where they say."""
    indices, data = np.array([0, 1, 2], np.int32), np.ones(3, np.float32)
    matrix = getattr(scipy.sparse, f"{'csc' if layout == 'csc' else 'csr'}_array")(
        (data, indices, [0, 1, 2, 3]), (3, 3)
    )
    matrix.indptr = np.array(indptr, np.int32)
    if layout == "npz":
        scipy.sparse.save_npz(tmp_path / "m.npz", matrix)
    with pytest.raises(ValueError, match=r"^SparseBatch.from_"):
        SparseBatch.from_npz(tmp_path / "m.npz") if layout == "npz" else SparseBatch.from_scipy(matrix)


@pytest.mark.parametrize("vocabulary", [30, 1 << 20])
def test_batches_are_pickled_and_copied(vocabulary):
    batch = random_batch(np.random.default_rng(0), 30, 40, weights="few")
    batch = SparseBatch.from_lists([[(3, 1.0)], []], vocabulary) if vocabulary > 30 else batch
    for again in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert_equal(again, batch)
