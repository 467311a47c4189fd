"""Sentence Transformers' own late interaction: losses, scores and training of a MultiVectorEncoder."""

from __future__ import annotations

import copy
import logging
import string
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from models import sentences
from torch import nn

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.multi_vector_encoder import losses
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.multi_vector_encoder.scoring import XTRScores, mean_colbert_scores

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import compilation, decisions, multi_vector_scores, packing, switch
from pylate_fastmaxsim.integrations.encoders import checkpoints_layers

COUNT = 8
QUERIES, POSITIVES, NEGATIVES = (sentences(COUNT, longest, seed) for longest, seed in ((6, 1), (20, 2), (20, 3)))
TEACHER = torch.linspace(-1, 1, 2 * COUNT).view(COUNT, 2)
LOSSES = [
    (losses.MultiVectorMultipleNegativesRankingLoss, {}),
    (losses.MultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 5, "score_mini_batch_size": 3, "scale": 2.0}),
    (losses.MultiVectorMultipleNegativesRankingLoss, {"similarity_fct": mean_colbert_scores, "scale": 8.0}),
    (losses.MultiVectorMultipleNegativesRankingLoss, {"similarity_fct": XTRScores(9)}),
    (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 3}),
    (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 8, "mini_batch_num_tokens": 60}),
    (losses.MultiVectorDistillKLDivLoss, {"temperature": 0.5}),
    (losses.MultiVectorMarginMSELoss, {}),
]


def load(path: str, **options: object) -> MultiVectorEncoder:
    torch.manual_seed(0)
    return MultiVectorEncoder(path, device="cpu", **options).double().train()


@pytest.fixture
def model(encoder) -> MultiVectorEncoder:
    return load(encoder("bert"))


def batch_of(model: MultiVectorEncoder) -> list[dict]:
    tasks = ["query", "document", "document"]
    return [
        {**model.preprocess(texts, task=task), "task": task}
        for texts, task in zip((QUERIES, POSITIVES, NEGATIVES), tasks, strict=True)
    ]


def run(model: MultiVectorEncoder, loss: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    value = loss(batch_of(model), TEACHER.clone())
    value.backward()
    return [value.detach().double(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def assert_equal(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    assert len(ours) == len(stock) > 1
    largest = max(gradient.abs().max() for gradient in stock[1:])
    # Scores are float32 in a model in float64 too.
    torch.testing.assert_close(ours[0], stock[0], rtol=2e-6, atol=0)
    for own, other in zip(ours[1:], stock[1:], strict=True):
        assert (own - other).abs().max() <= 3e-6 * largest


def modes(model: MultiVectorEncoder) -> set[str]:
    return set(packing._modes.get(model[0], {}).values())


@pytest.fixture
def scored(monkeypatch) -> list[None]:
    """An entry for each time that the operator was called."""
    made, operator = [], multi_vector_scores.maxsim
    monkeypatch.setattr(
        multi_vector_scores, "maxsim", lambda *args, **kwargs: made.append(None) or operator(*args, **kwargs)
    )
    return made


@pytest.mark.parametrize("loss_class, options", LOSSES)
def test_losses_and_gradients_are_those_of_stock(model, mode, scored, loss_class, options):
    loss = loss_class(model, **options)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    assert modes(model) == {mode}
    assert bool(scored) != isinstance(options.get("similarity_fct"), XTRScores)


@pytest.mark.parametrize("family", ["modernbert", "xlm-roberta", "qwen3", "mpnet", "longrope"])
def test_encoders(encoder, mode, family):
    model = load(encoder(family))
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    # MPNet attends in code of its own; long texts change what this Llama makes of short ones.
    assert modes(model) == {{"mpnet": "grouped", "longrope": "padded"}.get(family, mode)}


@pytest.mark.parametrize("attend", [True, False])
@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_query_expansion(encoder, mode, strategy, attend, caplog):
    model = load(encoder("bert"))
    model[0].query_expansion = {"strategy": strategy, "attend": attend, "length": 10}
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    # That they are padded is the rule.
    assert "with padding" not in caplog.text


def test_skipped_words_are_not_scored(encoder, mode):
    model = load(encoder("bert"))
    masks = next(module for module in model if hasattr(module, "skiplist_words"))
    masks.skiplist_words = list(string.punctuation)
    masks.resolve_with_tokenizer(model.tokenizer)
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    with_words = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), with_words)
    masks.skiplist_words = []
    masks.resolve_with_tokenizer(model.tokenizer)
    assert run(model, loss)[0] != with_words[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(model, mode, reentrant):
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model[0].auto_model.enable_input_require_grads()
    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=3)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    assert modes(model) == {mode}


def test_to_ask_for_checkpointing_warns_of_nothing(model):
    transformer = model[0]
    assert not checkpoints_layers(transformer)
    transformer.auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints_layers(transformer)
        wrapped = SimpleNamespace(module=transformer, static_graph=True)
        assert decisions.counts_checkpoints(wrapped)


def test_dropout_is_the_same_in_both_passes_of_gradcache(encoder, mode):
    """Otherwise cached gradients would belong to other embeddings: a step of them would not lower the loss."""
    model = load(encoder("bert", hidden_dropout_prob=0.3))
    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=3)
    pylate_fastmaxsim.enable()
    torch.manual_seed(1)
    cached = run(model, loss)
    whole = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=COUNT)
    seen = []
    hook = model[0].register_forward_hook(lambda *_: seen.append(_[2]["token_embeddings"].detach().clone()))
    run(model, whole)
    hook.remove()
    # Each column is encoded twice, and every time the same.
    first, second = seen[:3], seen[3:]
    for own, other in zip(first, second, strict=True):
        assert torch.equal(own, other)
    assert all(gradient.isfinite().all() for gradient in cached)


@pytest.mark.parametrize("compile_options", [{}, {"padding_free": False}])
def test_compiled_layers(model, packed, monkeypatch, compile_options):
    compile_call = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_call(self, backend="aot_eager", **options)
    )
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable(compile=True, **compile_options)
    assert_equal(run(model, loss), stock)
    layers = compilation.encoder_layers(model[0])
    assert all(layer._compiled_call_impl is not None for layer in layers)
    pylate_fastmaxsim.disable()
    assert all(layer._compiled_call_impl is None for layer in layers)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_layers_are_compiled_before_expanded_queries(encoder, packed, monkeypatch, dropout):
    """Checkpointing has to do in the backward what it did in the forward."""
    compile_call, seen = nn.Module.compile, []
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_call(self, backend="aot_eager", **options)
    )
    model = load(encoder("bert", hidden_dropout_prob=dropout))
    model[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 10}
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = compilation.encoder_layers(model[0])
    model[1].register_forward_hook(lambda *_: seen.append(layers[0]._compiled_call_impl is not None))
    pylate_fastmaxsim.enable(compile=True)
    run(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    assert seen and all(seen)


def test_a_model_that_is_compiled_as_a_whole_is_encoded_as_it_came(model):
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    model.compile(backend="eager")
    assert_equal(run(model, loss), stock)
    assert not modes(model)


def test_only_training_leaves_padding_out(model, mode):
    pylate_fastmaxsim.enable()
    with torch.no_grad():
        model.eval()(batch_of(model)[1], task="document")
        model.encode_document(POSITIVES[:2], show_progress_bar=False)
    assert not modes(model)
    model.train()(batch_of(model)[1], task="document")
    assert modes(model) == {mode}


def test_wider_batches_are_decided_about_and_narrower_ones_are_not(model, packed):
    pylate_fastmaxsim.enable()
    widths = []
    for longest in (30, 4, 12, 40):
        model(model.preprocess(sentences(4, longest), task="document"), task="document")
        widths.append(len(packing._modes[model[0]]))
    assert widths[0] == widths[1] == widths[2]


def test_the_output_is_that_of_stock_but_for_padding(model, mode):
    features = batch_of(model)[1]
    stock = model[0](dict(features))["token_embeddings"]
    pylate_fastmaxsim.enable()
    seen = []
    hook = model[1].register_forward_pre_hook(lambda _, args: seen.append(dict(args[0])))
    model(dict(features), task="document")
    hook.remove()
    assert seen[0].keys() == {*features, "token_embeddings"}
    attended = features["attention_mask"].bool()
    torch.testing.assert_close(seen[0]["token_embeddings"][attended], stock[attended])
    assert seen[0]["token_embeddings"].shape == stock.shape
    # Where a length of 0 would be divided by, losses would be NaN.
    assert seen[0]["token_embeddings"][~attended].any(dim=-1).all()


def prepared(model: MultiVectorEncoder) -> nn.Module:
    """As accelerate hands a model to the trainer."""
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


def of_ones_own(model: MultiVectorEncoder) -> nn.Module:
    model.__class__ = OfOnesOwn
    return model


class OfOnesOwn(MultiVectorEncoder):
    def forward(self, input: dict, task: str | None = None) -> dict:
        for module in self:
            input = module(input, **({"task": task} if isinstance(module, MultiVectorMask) else {}))
        return input


@pytest.mark.parametrize("change, padding_free", [(prepared, True), (of_ones_own, "always")])
def test_a_forward_of_a_models_own(model, mode, change, padding_free):
    changed = change(model.float())
    features = batch_of(model)[1]
    stock = changed(dict(features), task="document")
    pylate_fastmaxsim.enable(padding_free=padding_free)
    ours = changed(dict(features), task="document")
    assert modes(model) == {mode}
    attended = stock["attention_mask"]
    tolerance = {"rtol": 0, "atol": 0.05} if change is prepared else {}
    torch.testing.assert_close(ours["token_embeddings"][attended], stock["token_embeddings"][attended], **tolerance)


def test_a_forward_of_ones_own_may_look_at_padding(model, packed, caplog):
    pylate_fastmaxsim.enable()
    of_ones_own(model)(batch_of(model)[1], task="document")
    assert not modes(model)
    assert "OfOnesOwn may look at padding" in caplog.text


class Over(nn.Module):
    """A module of somebody's own behind the encoder."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: dict) -> dict:
        tokens = features["token_embeddings"]
        return {**features, "token_embeddings": self.layer(tokens.transpose(1, 2)).transpose(1, 2)}


@pytest.mark.parametrize("layer", [nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32)])
def test_modules_behind_the_encoder_may_look_at_padding(model, mode, caplog, layer):
    model.insert(1, Over(copy.deepcopy(layer)).double().train())
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    assert not modes(model)
    assert "with padding, as stock Sentence Transformers does: Over may look at padding" in caplog.text


def test_modules_of_ones_own_behind_the_encoder(model, mode):
    model.insert(1, Over(nn.Tanh()))
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable(padding_free="always")
    assert_equal(run(model, loss), stock)
    assert modes(model) == {mode}


def test_modules_of_sentence_transformers_behind_the_encoder(encoder, mode):
    routed = [load(encoder(family)) for family in ("bert", "modernbert")]
    for each in routed:
        each.insert(1, Dense(32, 32, module_input_name="token_embeddings").double())
    model = MultiVectorEncoder(modules=[Router.for_query_document(*map(list, routed))], device="cpu").train()
    model.append(HierarchicalTokenPooling(pool_factor=2))
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    assert [modes(each) for each in routed] == [{mode}, {mode}]


class Unit(nn.Module):
    def forward(self, features: dict) -> dict:
        tokens = features["token_embeddings"]
        return {**features, "token_embeddings": tokens / tokens.norm(dim=-1, keepdim=True)}


def test_a_normalization_of_ones_own_divides_by_no_zero(model, mode):
    model[[isinstance(module, Normalize) for module in model].index(True)] = Unit()
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable(padding_free="always")
    assert_equal(run(model, loss), stock)
    assert modes(model) == {mode}


def reasons(model: MultiVectorEncoder, change, caplog) -> str:
    change(model)
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), stock)
    assert modes(model) <= {"padded"}
    return caplog.text


def returns_all_layers(model):
    model[0].auto_model.config.output_hidden_states = True


def hooks(model):
    model[0].auto_model.register_forward_hook(lambda *_: None)


def pads_on_the_left(model):
    model.tokenizer.padding_side = "left"


def takes_messages(model):
    model[0].modality_config = {"message": model[0].modality_config["text"]}
    preprocess = model.preprocess
    model.preprocess = lambda *args, **kwargs: {**_as_text(model, preprocess, *args, **kwargs), "modality": "message"}


def _as_text(model, preprocess, *args, **kwargs):
    messages, model[0].modality_config = model[0].modality_config, {"text": model[0].modality_config["message"]}
    try:
        return preprocess(*args, **kwargs)
    finally:
        model[0].modality_config = messages


def takes_noise(model):
    model[0].auto_model.get_input_embeddings().neftune_noise_alpha = 0.0
    model[0].auto_model.embeddings.word_embeddings.neftune_noise_alpha = 1e-9


@pytest.mark.parametrize(
    "change, said",
    [
        (returns_all_layers, "it is to return the hidden states of all layers."),
        (hooks, "a hook of your own is on BertModel"),
        (pads_on_the_left, "the tokenizer pads on the left"),
        (takes_messages, "it takes no plain texts, with which it could be tried out."),
        (takes_noise, "NEFTune scales its noise by the width of a call"),
    ],
)
def test_what_needs_padding_has_it(model, packed, caplog, change, said):
    text = reasons(model, change, caplog)
    assert "with padding, as stock Sentence Transformers does: " in text and said in text


def test_gaps_need_padding(model, packed, caplog):
    def with_gaps(features):
        features["attention_mask"][:, 1] = 0
        return features

    features = with_gaps(model.preprocess(POSITIVES, task="document"))
    stock = model(dict(features), task="document")["token_embeddings"]
    pylate_fastmaxsim.enable()
    torch.testing.assert_close(model(dict(features), task="document")["token_embeddings"], stock)
    assert "with padding, as stock Sentence Transformers does: one has a gap in its attention_mask." in caplog.text


def test_texts_without_a_token_that_is_attended_to(model, mode):
    features = model.preprocess(POSITIVES, task="document")
    features["attention_mask"] = torch.zeros_like(features["attention_mask"])
    stock = model(dict(features), task="document")
    pylate_fastmaxsim.enable()
    ours = model(dict(features), task="document")
    assert ours["token_embeddings"].shape == stock["token_embeddings"].shape
    assert not ours["attention_mask"].any()


def said(model: MultiVectorEncoder, features: dict) -> str:
    try:
        model(dict(features), task="document")
    except Exception as error:
        return repr(error)
    return "nothing"


def test_no_texts_are_left_to_sentence_transformers(model, mode):
    features = model.preprocess(POSITIVES, task="document")
    features |= {key: features[key][:0] for key in ("input_ids", "token_type_ids", "attention_mask")}
    stock = said(model, features)
    pylate_fastmaxsim.enable()
    assert said(model, features) == stock


def only_ids(features: dict) -> dict:
    return {key: value for key, value in features.items() if key != "attention_mask"}


def mask_of_pairs(features: dict) -> dict:
    attended = features["attention_mask"].bool()
    return {**features, "attention_mask": attended[:, None, None] & attended[:, None, :, None]}


@pytest.mark.parametrize("change", [only_ids, mask_of_pairs])
def test_attention_masks_of_ones_own_are_left_to_sentence_transformers(model, mode, change):
    del model[[isinstance(module, MultiVectorMask) for module in model].index(True)]
    features = model.preprocess(POSITIVES, task="document")
    attended = features["attention_mask"].bool()
    stock = model(change(features), task="document")["token_embeddings"]
    pylate_fastmaxsim.enable()
    ours = model(change(features), task="document")["token_embeddings"]
    torch.testing.assert_close(ours[attended], stock[attended])


def test_keywords_stand_in_for_features(model, mode):
    model.module_kwargs = {"0": ["attention_mask"]}
    features = model.preprocess(POSITIVES, task="document")
    attended = features["attention_mask"].bool()
    shorter = attended & (torch.arange(attended.shape[1]) < 5)
    stock = model(dict(features), task="document", attention_mask=shorter)["token_embeddings"]
    pylate_fastmaxsim.enable()
    ours = model(dict(features), task="document", attention_mask=shorter)["token_embeddings"]
    torch.testing.assert_close(ours[attended], stock[attended])


def copied(module: nn.Module) -> nn.Module:
    """What DataParallel makes for one step."""
    copy = module._replicate_for_data_parallel()
    for name, weight in module._parameters.items():
        setattr(copy, name, None if weight is None else weight.view_as(weight))
    for name, inner in module._modules.items():
        copy._modules[name] = copied(inner)
    return copy


def test_copies_of_data_parallel(model, packed, caplog):
    features = batch_of(model)[1]
    stock = model(dict(features), task="document")["token_embeddings"]
    pylate_fastmaxsim.enable(compile=True)
    for _ in range(2):
        ours = copied(model)(dict(features), task="document")["token_embeddings"]
    torch.testing.assert_close(ours, stock)
    assert not compilation._compiled and not modes(model)
    assert caplog.text.count("DataParallel copies the model") == caplog.text.count("compile=True does nothing") == 1


def test_what_sentence_transformers_flattened_is_left_to_it(model, packed, caplog):
    pylate_fastmaxsim.enable(compile=True)
    flat = {"input_ids": torch.ones(1, 4, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4])}
    model(flat, task="document")
    assert not modes(model) and not compilation._compiled
    assert "compile=True does nothing: Sentence Transformers leaves padding out itself." in caplog.text
    assert caplog.text.count("calls the encoder for each column of a batch") == 1
    caplog.clear()
    pylate_fastmaxsim.disable()
    pylate_fastmaxsim.enable(padding_free=False)
    model(flat, task="document")
    assert "leaves padding out itself" not in caplog.text


def test_off_again_everything_is_as_it_came(model, caplog):
    from sentence_transformers.base.modules import Transformer

    names = {"__call__", "forward"}
    stock = Transformer.forward, names & vars(MultiVectorEncoder).keys()
    with caplog.at_level(logging.INFO), pylate_fastmaxsim.enabled():
        assert Transformer.forward is not stock[0]
        run(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    assert (Transformer.forward, names & vars(MultiVectorEncoder).keys()) == stock
    assert MultiVectorEncoder.__call__ is nn.Module.__call__
    assert "Sentence Transformers" in caplog.text and " accelerated: fused MaxSim" in caplog.text


def test_options_that_only_pylate_has(caplog, monkeypatch):
    # Another host may be there too.
    of_sentence_transformers = tuple(host for host in switch._HOSTS if host.name == "Sentence Transformers")
    monkeypatch.setattr(switch, "_HOSTS", of_sentence_transformers)
    pylate_fastmaxsim.enable(ring=True, stock_masking=True)
    assert "stock_masking=True and ring=True: only PyLate has that." in caplog.text
