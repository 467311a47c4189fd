import pickle
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save

from pylate_fastmaxsim import ResidualCodec
from tests.support.power_cut import states, written
from tests.support.residual_codecs import random_codec, unit_vectors


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_are_those_of_an_index_of_fast_plaid(bits, tmp_path):
    search = pytest.importorskip("fast_plaid.search")
    vectors = unit_vectors(1600, 16)
    index = search.FastPlaid(str(tmp_path), device="cpu")
    index.create(documents_embeddings=list(vectors.split(4)), nbits=bits, kmeans_niters=1)

    def written(name):
        return torch.from_numpy(np.load(tmp_path / f"{name}.npy"))

    codec = ResidualCodec(written("centroids"), written("bucket_weights").half(), written("bucket_cutoffs"))
    codes, packed, scales = codec.encode(vectors)
    # fast-plaid rounds products to float16, so that of two centroids with nearly equal ones either may come first.
    best, second = (vectors.half().float() @ codec.centroids.float().T).topk(2, dim=1).values.unbind(dim=1)
    clear = best - second > 1e-3
    assert clear.float().mean() > 0.95
    for ours, name in ((codes.long(), "codes"), (packed, "residuals")):
        assert torch.equal(ours[clear], written(f"0.{name}")[clear])
    decoded = (codec.decode(codes, packed, lengths) for lengths in (scales, None))
    torch.testing.assert_close(*decoded, rtol=3e-3, atol=0)


def test_a_vector_keeps_its_length():
    vectors = 7 * unit_vectors(20, 16)
    vectors[3] = 0
    codec = random_codec(16, 4)
    decoded = codec.decode(*codec.encode(vectors))
    torch.testing.assert_close(decoded.norm(dim=1), vectors.norm(dim=1))
    assert F.cosine_similarity(decoded, vectors)[vectors.any(dim=1)].min() > 0.7
    # By its direction: the same codes for every length.
    codes, packed, scales = codec.encode(vectors)
    shorter = codec.encode(vectors / 7)
    assert torch.equal(codes, shorter[0]) and (packed != shorter[1]).float().mean() < 0.01
    torch.testing.assert_close(scales[:3], 7 * shorter[2][:3], rtol=1e-2, atol=0)


@pytest.mark.parametrize("length", [1e-30, 1e30])
def test_a_vector_whose_square_is_no_float32_keeps_its_direction(length):
    codec, vectors = random_codec(16, 4), unit_vectors(20, 16)
    decoded = codec.decode(*codec.encode(length * vectors)) / length
    torch.testing.assert_close(decoded, codec.decode(*codec.encode(1.5 * vectors)) / 1.5, rtol=0, atol=0.1)
    torch.testing.assert_close(decoded.norm(dim=1), torch.ones(20))


def test_what_a_codec_keeps_for_later_has_backwards_and_stays_in_its_process():
    codec = random_codec(8, 2)
    with torch.inference_mode():
        kept = codec.byte_values, codec.to("meta").centroids
    assert not any(tensor.is_inference() for tensor in kept)
    again = pickle.loads(pickle.dumps(codec))
    assert numbers_of(again) == numbers_of(codec) and again.to("meta") is not codec.to("meta")


def test_training_finds_centroids_and_quantiles():
    centres = unit_vectors(8, 16)
    noise = 0.02 * torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    sample = F.normalize(centres.repeat(500, 1) + noise, dim=-1)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    codecs = [ResidualCodec.train(scale * sample, bits=4, centroids=32, seed=3) for scale in (1, 1, 5)]
    assert torch.equal(torch.get_rng_state(), state[0]) and np.random.get_state()[1].tolist() == state[1]  # noqa: NPY002
    codec = codecs[0]
    assert (codec.centroids.float() @ centres.T).amax(dim=0).min() > 0.99
    share = torch.bincount(codec.byte_values[codec.encode(sample)[1].long()].flatten().mul(2**14).int() + 2**14)
    share = share[share > 0] / share.sum()
    assert len(share) == 16 and share.min() > 0.04 and share.max() < 0.09
    assert torch.equal(codecs[1].centroids, codec.centroids) and torch.equal(codecs[1].cutoffs, codec.cutoffs)
    torch.testing.assert_close(codecs[2].cutoffs, codec.cutoffs, rtol=0, atol=2e-3)
    assert len(ResidualCodec.train(sample[:100], bits=1).centroids) == 95


def test_what_is_no_codec_is_named(tmp_path):
    file = tmp_path / "codec.safetensors"
    codec = random_codec(12, 2)
    codec.save(file)
    whole = file.read_bytes()
    said = f"^ResidualCodec.load: {file} is damaged, or no codec .*; put it back as [^\n]*$"
    for content in (*(whole[:size] for size in range(0, len(whole), 97)), save({"centroids": codec.centroids})):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            ResidualCodec.load(file)
    with pytest.raises(FileNotFoundError):
        ResidualCodec.load(tmp_path / "another")


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_flipped_bit_of_a_codec_changes_no_number(bits, tmp_path):
    file, numbers = tmp_path / "codec.safetensors", random.Random(bits)
    codec = random_codec(8, bits)
    codec.save(file)
    content = file.read_bytes()
    assert numbers_of(ResidualCodec.load(file)) == numbers_of(codec)
    for _ in range(400):
        damaged = bytearray(content)
        damaged[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        file.write_bytes(damaged)
        try:
            assert numbers_of(ResidualCodec.load(file)) == numbers_of(codec)
        except ValueError as error:
            assert str(file) in str(error) and "\n" not in str(error)


def numbers_of(codec: ResidualCodec) -> list[list]:
    return [getattr(codec, name).tolist() for name in ("centroids", "weights", "cutoffs")]


def test_saving_leaves_the_old_codec_or_the_new_one(tmp_path):
    old, new = random_codec(8, 2), random_codec(8, 4)
    root = tmp_path / "root"
    root.mkdir()
    old.save(root / "codec.safetensors")
    for number, (_, state) in enumerate(states(root, lambda: new.save(root / "codec.safetensors"), cuts=20)):
        left = ResidualCodec.load(written(state, tmp_path / str(number)) / "codec.safetensors")
        assert numbers_of(left) in (numbers_of(old), numbers_of(new))


def changed(**tensors):
    codec = random_codec(8, 2)
    return ResidualCodec(**{name: getattr(codec, name) for name in ("centroids", "weights", "cutoffs")} | tensors)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(centroids=torch.zeros(2, 8)), r"centroids must be float16 \[C, d\], got torch.float32"),
        (lambda: changed(weights=torch.zeros(8).half()), "bits must be 1, 2 or 4, .* got 8 weights and 3 cutoffs"),
        (lambda: changed(cutoffs=torch.full((3,), torch.nan)), "cutoffs must be finite"),
        (lambda: changed(cutoffs=torch.tensor([0.1, -0.1, 0.2])), "cutoffs must be ascending"),
        (lambda: changed(centroids=torch.zeros(1, 6).half()), r"d \* bits must be a multiple of 8, got d = 6 and 2"),
        (lambda: random_codec(8, 2).encode(torch.zeros(3, 16)), "the codec is for d = 8, but the vectors have d = 16"),
        (lambda: random_codec(8, 2).encode(torch.zeros(3, 8).int()), r"floating point \[T, d\], got torch.int32"),
        (lambda: random_codec(8, 2).encode(torch.zeros(3, 8, device="meta")), "on cpu and the vectors on meta"),
        (lambda: ResidualCodec.train(torch.zeros(9, 8), bits=3), "train: bits must be 1, 2 or 4, got 3"),
        (lambda: ResidualCodec.train(torch.full((9, 8), torch.inf)), "sample must be finite"),
        (lambda: ResidualCodec.train(torch.zeros(9, 8), centroids=9), "one vector more than centroids, got 9 for 9"),
    ],
)
def test_errors_say_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_without_fastkmeans_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastkmeans", None)
    with pytest.raises(ImportError, match="train needs fastkmeans: pip install fastkmeans"):
        ResidualCodec.train(unit_vectors(50, 8))
