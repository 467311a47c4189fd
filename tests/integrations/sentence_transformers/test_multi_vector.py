"""Sentence Transformers' own late interaction: what of a MultiVectorEncoder is encoded without padding, and what is not."""

import copy
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from sentence_transformers.sentence_transformer.modules import CNN
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import doctor, hosts
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from pylate_fastmaxsim.integrations.encoding import modes as encoding_modes
from tests.support.hosts import encoder_calls
from tests.support.models import looking
from tests.support.multi_vector import HOST, POSITIVES, QUERIES, OfOnesOwn, batch_of, load, modes, step_of


@pytest.fixture
def model(encoder) -> MultiVectorEncoder:
    return load(encoder("bert"))


@pytest.mark.parametrize(("strategy", "attend"), [("fixed", True), ("min", False)])
def test_query_expansion(encoder, mode, monkeypatch, caplog, strategy, attend):
    model = load(encoder("bert"))
    model[0].query_expansion = {"strategy": strategy, "attend": attend, "length": 10}
    HOST.assert_as_stock(model, step_of(model), monkeypatch)
    # That they are padded is the rule.
    assert "with padding" not in caplog.text


def test_columns_that_are_not_merged(model, packed, monkeypatch):
    step = step_of(model)
    made, stock = encoder_calls(model), step.run()
    pylate_fastmaxsim.enable()
    # Behind enable(), which leaves a loss to stock if a function that it calls was replaced before.
    merge = "sentence_transformers.base.losses.merged_forward.merge_feature_batches"
    monkeypatch.setattr(merge, lambda features_list: None)
    step.run()
    made.clear()
    step.assert_equal(step.run(), stock)
    assert len(made) == 1


def test_only_training_and_encode_leave_padding_out(model, mode):
    pylate_fastmaxsim.enable()
    with torch.no_grad():
        model.eval()(batch_of(model)[1], task="document")
    assert not modes(model)
    model.encode_document(POSITIVES[:2], show_progress_bar=False)
    assert modes(model) == ({mode} if hasattr(type(model), "_inference") else set())
    model.train()(batch_of(model)[1], task="document")
    assert modes(model) == {mode}


def test_queries_are_not_decided_about_again_after_longer_documents(model, packed):
    """An evaluator encodes both in turn, and a decision takes a dozen calls of the encoder."""
    pylate_fastmaxsim.enable()
    decided = []
    for _ in range(2):
        model.encode_query(QUERIES, show_progress_bar=False)
        model.encode_document(POSITIVES, show_progress_bar=False)
        decided.append(len(encoding_modes.chosen.get(model[0], ())))
    assert decided[0] == decided[1]


def test_the_output_is_that_of_stock_but_for_padding(model, mode):
    features = batch_of(model)[1]
    stock = model[0](dict(features))["token_embeddings"]
    pylate_fastmaxsim.enable()
    seen = []
    model[1].register_forward_pre_hook(looking(lambda _, args: seen.append(dict(args[0]))))
    for _ in range(2):  # the first call has trials
        seen.clear()
        model(dict(features), task="document")
    assert modes(model) == {mode}
    assert seen[0].keys() == {*features, "token_embeddings"}
    attended = features["attention_mask"].bool()
    torch.testing.assert_close(seen[0]["token_embeddings"][attended], stock[attended])
    assert seen[0]["token_embeddings"].shape == stock.shape
    # Where a length of 0 would be divided by, losses would be NaN.
    assert seen[0]["token_embeddings"][~attended].any(dim=-1).all()


def test_a_model_as_accelerate_prepares_it(model, mode):
    AcceleratorState._reset_state(reset_partial_state=True)  # of a trainer in another test
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model.float())
    features = batch_of(model)[1]
    stock = prepared(dict(features), task="document")
    pylate_fastmaxsim.enable()
    ours = prepared(dict(features), task="document")["token_embeddings"]
    assert modes(model) == {mode}
    # The check on the first batch runs inside of accelerate's autocast, which must end all the same.
    assert not torch.is_autocast_enabled("cpu")
    attended = stock["attention_mask"]
    torch.testing.assert_close(ours[attended], stock["token_embeddings"][attended], rtol=0, atol=0.05)


PADDED = "with padding, as stock Sentence Transformers does: "


def dense(activation: nn.Module | None = None) -> Dense:
    return Dense(32, 32, activation_function=activation, module_input_name="token_embeddings").double().train()


class Over(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: dict) -> dict:
        tokens = features["token_embeddings"]
        return {**features, "token_embeddings": self.layer(tokens.transpose(1, 2)).transpose(1, 2)}


class Centred(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values - values.mean(dim=1, keepdim=True)


def centred(output: dict | torch.Tensor) -> dict | torch.Tensor:
    if isinstance(output, dict):
        return {**output, "token_embeddings": Centred()(output["token_embeddings"])}
    return Centred()(output)


def activated(activation):
    def change(model):
        # Not the module, which would only be called: a function is an attribute like any other.
        del model[1].activation_function
        model[1].activation_function = activation

    return change


def hooked_on(find):
    return lambda model: find(model).register_forward_hook(lambda _module, _args, output: centred(output))


def hooked_before(model):
    model[-1].register_forward_pre_hook(lambda _, args: (centred(args[0]),))


def called_otherwise(model):
    forward = model.forward
    model.forward = lambda *args, **kwargs: centred(forward(*args, **kwargs))


def inserted(module):
    return lambda model: model.insert(2, copy.deepcopy(module).double().train())


class Untrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)
        nn.init.zeros_(self.convolution.weight)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.convolution(values)


OVER = "Over is a module of your own"
# What is changed in a model, and which part that reads padding is named without and with padding_free="always".
READERS = {
    "hook inside Dense": (hooked_on(lambda model: model[1].linear), "a hook of your own is on Linear", "Dense"),
    "hook before Normalize": (hooked_before, "a hook of your own is on Normalize", "Normalize"),
    "hook on the model": (hooked_on(lambda model: model), "a hook of your own is on Multi", "MultiVectorEncoder"),
    "forward of the model": (called_otherwise, "the forward of MultiVectorEncoder is a", "MultiVectorEncoder"),
    "activation of one's own": (activated(Centred()), "Centred is a module of your own", "Dense"),
    "activation that is a function": (activated(lambda values: Centred()(values)), "activation_function of", "Dense"),
    "activation of PyTorch": (activated(nn.Softmax(dim=1)), "Dense reads the states of padding", "Dense"),
    "CNN": (inserted(CNN(32, 32, kernel_sizes=[3])), "CNN reads the states of padding", "CNN"),
    "convolution that is 0 now": (inserted(Over(Untrained())), OVER, "Over"),
    "statistics": (inserted(Over(nn.BatchNorm1d(32))), OVER, "Over"),
}


@pytest.mark.parametrize("padding_free", [True, "always"])
@pytest.mark.parametrize("case", READERS)
def test_what_reads_padding_is_given_it(model, packed, monkeypatch, caplog, case, padding_free):
    change, said, reader = READERS[case]
    torch.manual_seed(0)
    model.insert(1, dense())
    change(model)
    HOST.assert_as_stock(model, step_of(model), monkeypatch, padding_free=padding_free)
    assert modes(model) == {"padded"}
    if padding_free == "always":
        said = f"{reader} reads the states of padding"
    assert caplog.text.count(PADDED) == caplog.text.count(said) == 1


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda model: setattr(model, "__class__", OfOnesOwn), "OfOnesOwn is a module of your own"),
        (lambda m: setattr(m[0].auto_model.config, "output_hidden_states", True), "it returns the hidden states"),
        (lambda m: m[0].auto_model.register_forward_hook(lambda *_: None), "a hook of your own is on BertModel"),
        (lambda model: setattr(model.tokenizer, "padding_side", "left"), "the tokenizer pads on the left"),
    ],
)
def test_what_needs_padding_has_it(model, packed, monkeypatch, caplog, change, said):
    change(model)
    HOST.assert_as_stock(model, step_of(model), monkeypatch)
    assert modes(model) <= {"padded"}
    assert PADDED in caplog.text and said in caplog.text


class Unit(nn.Module):
    def forward(self, features: dict) -> dict:
        tokens = features["token_embeddings"]
        return {**features, "token_embeddings": tokens / tokens.norm(dim=-1, keepdim=True)}


@pytest.mark.parametrize("divides", [False, True])
def test_modules_of_ones_own_behind_the_encoder(model, mode, monkeypatch, divides):
    if divides:  # by no zero, which would be the norm of padding
        model[[isinstance(module, Normalize) for module in model].index(True)] = Unit()
    else:
        model.insert(1, Over(nn.Tanh()))
    HOST.assert_as_stock(model, step_of(model), monkeypatch, padding_free="always")
    assert modes(model) == {mode}


def test_modules_of_sentence_transformers_behind_the_encoder(encoder, mode, monkeypatch):
    routed = [load(encoder(family)) for family in ("bert", "modernbert")]
    for each in routed:
        each.insert(1, dense())
    model = MultiVectorEncoder(modules=[Router.for_query_document(*map(list, routed))], device="cpu").train()
    model.extend(map(HierarchicalTokenPooling, (2, 1)))
    HOST.assert_as_stock(model, step_of(model), monkeypatch)
    assert [modes(each) for each in routed] == [{mode}, {mode}]


class First(HierarchicalTokenPooling):
    def pool_one(self, embedding, **kwargs):
        return embedding[:1]


@pytest.mark.parametrize("pooling", [HierarchicalTokenPooling(2), First(2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_embeddings_that_are_pooled_later(pooling, dtype):
    tokens = torch.nn.functional.normalize(torch.randn(3, 9, 8), dim=-1).to(dtype)
    lists = [tokens[0], tokens[1, :4], tokens[2, :0]]
    expected = [*pooling.pool(lists), *pooling.pool(tokens), *pooling.pool(lists, task="query")]
    pylate_fastmaxsim.enable()
    made = [*pooling.pool(lists), *pooling.pool(tokens), *pooling.pool(lists, task="query")]
    torch.testing.assert_close(made, expected)
    with pytest.raises(ValueError, match="list entries must be 2D tensors"):
        pooling.pool([tokens])


def test_routes_that_share_their_encoder(model, mode, monkeypatch):
    encoder, *rest = model
    convolved = CNN(32, 32, kernel_sizes=[3]).double()
    routed = Router.for_query_document([encoder, *rest], [encoder, convolved, *rest])
    routed = MultiVectorEncoder(modules=[routed], device="cpu").train()
    HOST.assert_as_stock(routed, step_of(routed), monkeypatch)
    assert modes(model) == {mode, "padded"}


@pytest.mark.parametrize(("gap", "said"), [(slice(1, 2), "one has a gap in its attention_mask"), (slice(None), "")])
def test_gaps_and_texts_without_a_token(model, packed, caplog, gap, said):
    features = model.preprocess(POSITIVES, task="document")
    features["attention_mask"][:, gap] = 0
    stock = model(dict(features), task="document")
    pylate_fastmaxsim.enable()
    ours = model(dict(features), task="document")
    assert said in caplog.text
    assert torch.equal(ours["attention_mask"], stock["attention_mask"])
    attended = stock["attention_mask"].bool()
    torch.testing.assert_close(ours["token_embeddings"][attended], stock["token_embeddings"][attended])
    assert ours["token_embeddings"].shape == stock["token_embeddings"].shape


def copied(module: nn.Module) -> nn.Module:
    copy = module._replicate_for_data_parallel()
    for name, weight in module._parameters.items():
        setattr(copy, name, None if weight is None else weight.view_as(weight))
    for name, inner in module._modules.items():
        copy._modules[name] = copied(inner)
    return copy


def is_compiled(model: nn.Module) -> bool:
    return any(layer._compiled_call_impl is not None for layer in encoder_layers(model))


def test_copies_of_data_parallel(model, packed, caplog):
    features = batch_of(model)[1]
    stock = model(dict(features), task="document")["token_embeddings"]
    pylate_fastmaxsim.enable(compile=True)
    for _ in range(2):
        copy = copied(model)
        torch.testing.assert_close(copy(dict(features), task="document")["token_embeddings"], stock)
    assert not is_compiled(copy) and not modes(model)
    for said in ("does: DataParallel copies the model", "compile=True does nothing"):
        assert caplog.text.count(said) == 1


def test_what_sentence_transformers_flattened_is_left_to_it(model, packed, caplog):
    pylate_fastmaxsim.enable(compile=True)
    flat = {"input_ids": torch.ones(1, 4, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4])}
    model(flat, task="document")
    assert not modes(model) and not is_compiled(model)
    assert "compile=True does nothing: Sentence Transformers leaves padding out itself." in caplog.text
    assert caplog.text.count("calls the encoder for each column of a batch") == 1


def test_off_again_everything_is_as_it_came(model, caplog):
    names = {"__call__", "forward"}
    stock = Transformer.forward, names & vars(MultiVectorEncoder).keys()
    with caplog.at_level(logging.INFO), pylate_fastmaxsim.enabled():
        assert Transformer.forward is not stock[0]
        step_of(model).run()
    assert (Transformer.forward, names & vars(MultiVectorEncoder).keys()) == stock
    assert MultiVectorEncoder.__call__ is nn.Module.__call__
    assert "Sentence Transformers" in caplog.text and " accelerated: fused MaxSim" in caplog.text
    assert {
        "sentence_transformers.util.similarity.maxsim",
        "sentence_transformers.base.modules.transformer.Transformer.forward",
    } <= set(doctor.diagnose()["enable() replaces"])


def test_an_option_that_only_pylate_has(caplog, monkeypatch):
    # Another host may be there too.
    monkeypatch.setattr(hosts, "HOSTS", tuple(host for host in hosts.HOSTS if host.name == "Sentence Transformers"))
    pylate_fastmaxsim.enable(stock_masking=True)
    assert "stock_masking=True has no effect: it is an option for PyLate." in caplog.text
