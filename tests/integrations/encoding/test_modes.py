"""How a model is encoded, and why: whatever its first batch shows, losses and gradients are those of stock."""

import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from pylate import losses
from sentence_transformers.losses import MatryoshkaLoss
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from tests.support.compared import assert_equal, batch_of, run
from tests.support.encoded import Normalised, mode_of
from tests.support.models import TEXT, Behind, attend_to_own_document, collated, features, load_model, sentences

BATCHES = batch_of, partial(batch_of, seed=10)
cached = partial(losses.CachedContrastive, mini_batch_size=4)


class Case(NamedTuple):
    mode: str
    # A part of the line that says why documents are not packed.
    said: str = ""
    family: str = "bert"
    # Changes the model, and may return one that is around it.
    change: Callable[[nn.Module], nn.Module | None] = lambda model: None
    batches: tuple[Callable, ...] = BATCHES
    loss: Callable[[nn.Module], nn.Module] = losses.Contrastive
    # Of the encoder's configuration, of the model, and of enable().
    config: dict = {}
    load: dict = {}
    options: dict = {}


ALWAYS = {"padding_free": "always"}


def texts_of(words: int, count: int = 4) -> list[str]:
    return [" ".join(TEXT.split()[begin : begin + words]) for begin in range(count)]


def of_widths(*words: int) -> tuple[Callable, ...]:
    return tuple(lambda model, collate, n=n: collate(model, texts_of(2), texts_of(n)) for n in words)


def attending(own: Callable) -> Callable[[nn.Module], None]:
    return lambda _model: setattr(encoding_attention, "variable_length_attention", own)


def wide(*args, window, **options):
    return attend_to_own_document(*args, window=(-1, -1), **options)


def inexact(*args, **options):
    output = attend_to_own_document(*args, **options)
    return output * torch.linspace(1, 1 + 1e-5, output.shape[-1])


def take_no_positions(model):
    model[0].model_forward_params = model[0].model_forward_params - {"position_ids"}


def with_positions(model, collate):
    batch = batch_of(model, collate=collate)
    for column in batch[1:]:
        column["position_ids"] = torch.arange(32).expand_as(column["input_ids"])
    return batch


def beyond_positions(model, collate):
    """RoBERTa counts from behind its padding token: 62 of the 64 positions are for tokens."""
    batch = features(model, sentences(4, longest=4), sentences(4, longest=8), sentences(4, longest=40, seed=1))
    for column in batch[1:]:
        assert column["input_ids"].shape[1] == 64
        # PyLate pads with the mask token, which has a position.
        column["input_ids"][column["attention_mask"] == 0] = model[0].auto_model.config.pad_token_id
    return batch


def centred(output):
    return output - output.mean(dim=(0, 1))


class Centred(Behind):
    """Only in training, so that no trial finds it."""

    def change(self, features):
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": centred(embeddings) if self.training else embeddings}


class Tokenwise(Behind):
    def change(self, features):
        return {**features, "token_embeddings": features["token_embeddings"].tanh()}


def behind(kind: type) -> Callable[[nn.Module], None]:
    return lambda model: model.__setitem__(1, kind(model[1]))


def output_of(model) -> nn.Module:
    return model[0].auto_model.encoder.layer[-1].output


def hook(model):
    output_of(model).register_forward_hook(lambda _module, _args, output: centred(output))


def backward_hook(model):
    decorated = torch.no_grad()(lambda _module, given, _: tuple(each / each.norm() for each in given))
    output_of(model).register_full_backward_hook(decorated)


def forward(model):
    stock = output_of(model).forward
    output_of(model).forward = lambda *args: centred(stock(*args))


def own_attention(model):
    def own(*args, **kwargs):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)

    AttentionInterface.register("own", own)
    AttentionMaskInterface.register("own", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model[0].auto_model.set_attn_implementation("own")


def add_noise(model):
    embeddings = model[0].auto_model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)


def written_in(library, function):
    return FunctionType(function.__code__, {"__name__": library})


def what_libraries_add(model):
    """An adapter, a parametrisation, a forward as Liger replaces it, and hooks as of wandb.watch."""
    model[0].auto_model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, target_modules=["query"]))
    nn.utils.parametrizations.weight_norm(model[1].linear)
    norm = output_of(model).LayerNorm
    norm.forward = MethodType(written_in("liger_kernel", lambda self, hidden: type(self).forward(self, hidden)), norm)
    watch = written_in("wandb", lambda *_: None)
    # Not on what is behind the encoder: models share the default activation of PyLate's Dense.
    for module in model[0].modules():
        module.register_forward_hook(watch)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_hook(watch)


def cut(output):
    return {**output, "token_embeddings": output["token_embeddings"][..., :8]}


def averaged(model):
    wrapper = AveragedModel(nn.Module())
    wrapper.module = model
    return wrapper


def averaged_and_cut(model):
    wrapper = averaged(model)
    wrapper.register_forward_hook(lambda _module, _args, output: cut(output))
    return wrapper


class Scoring(nn.Module):
    skiplist = ()
    do_query_expansion = False

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, features):
        return self.module(features)


def matryoshka(model):
    stock = model.forward
    # PyLate's models leave no such key, which this loss shrinks as well.
    model.forward = lambda features: (output := stock(features)) | {"sentence_embedding": output["token_embeddings"]}
    return MatryoshkaLoss(model, losses.Contrastive(model), [16, 8])


LORA = LoraConfig(target_modules=["query"], r=4, init_lora_weights=False)


def adapted_encoder(model):
    model[0].auto_model = get_peft_model(model[0].auto_model, LORA).double().train()


OWN = "and may not treat each text by itself"
CASES = {
    "left padding": Case("padded", "on the left", change=lambda m: setattr(m.tokenizer, "padding_side", "left")),
    "another feature": Case("padded", "the encoder is given position_ids", batches=(with_positions,)),
    "DataParallel": Case("padded", "DataParallel splits a batch by rows", change=nn.DataParallel),
    # What one's own code does to a batch in training no trial finds.
    "own module": Case("padded", f"Centred is a module of your own, {OWN}", change=behind(Centred), loss=cached),
    "own forward": Case("padded", "the forward of BertOutput is a function of your own, ", change=forward, loss=cached),
    "own hook": Case("padded", f"a hook of your own is on BertOutput, {OWN}", change=hook, loss=cached),
    "own backward hook": Case("padded", "a hook of your own is on BertOutput, ", change=backward_hook, loss=cached),
    "own wrapper": Case("padded", "with padding, as stock PyLate does: ", change=averaged_and_cut),
    "own wrapper with tokens": Case("padded", "Scoring is ", change=lambda model: averaged(Scoring(model))),
    "own loss around": Case("padded", "the forward of ColBERT was replaced", loss=matryoshka),
    "said to be by text": Case("packed", change=behind(Tokenwise), loss=cached, options=ALWAYS),
    "said, and shows not to be": Case("padded", "BertModel gives other token", change=hook, options=ALWAYS),
    "of libraries": Case("packed", change=what_libraries_add, loss=cached),
    "adapters around": Case("packed", change=lambda model: get_peft_model(model, LORA).double()),
    "adapters around the encoder": Case("packed", change=adapted_encoder),
    # Neither does one's own attention, which may add a trained bias that begins at zero.
    "own attention": Case("grouped", "attn_implementation='own' is not a function of transf", change=own_attention),
    "BatchNorm": Case("padded", "BatchNorm1d normalises by", change=behind(Normalised), loss=cached, options=ALWAYS),
    "NEFTune": Case("padded", "NEFTune scales its noise by the width of a call", change=add_noise, options=ALWAYS),
    # What the trial finds.
    "no positions": Case("grouped", "takes no position_ids", "modernbert", take_no_positions),
    "window forgotten": Case("grouped", "other token embeddings", "modernbert", attending(wide)),
    # Long documents are looked at before there are any.
    "window forgotten, short": Case("grouped", "other token", "modernbert", attending(wide), (*of_widths(1), batch_of)),
    "inexact": Case("grouped", "other token embeddings", change=attending(inexact)),
    "beyond positions": Case("packed", family="xlm-roberta", batches=(beyond_positions,), load={"document_length": 64}),
    "no longer row": Case(
        "grouped",
        "CLIPTextModel cannot take packed documents (ValueError: Sequence length must be less",
        "clip",
        batches=(partial(batch_of, queries=1), batch_of),
        config={"max_position_embeddings": 77},
        load={"document_length": 30},
    ),
    # What an encoder makes of padding is looked at before there is any.
    "convolutions": Case("padded", "ConvBert", "convbert", batches=(*of_widths(60), batch_of)),
    "Fourier": Case("padded", "FNet", "fnet", batches=(*of_widths(60), batch_of)),
    # Calls that only look at it must not: it does so for good.
    "attention replaced": Case(
        "padded",
        "replaces its modules by the lengths of the texts in a call",
        "bigbird",
        batches=(lambda model, collate: collate(model, sentences(4, 20), sentences(4, 80, seed=1)),),
        config={"max_position_embeddings": 128},
        load={"document_length": 96, "query_length": 48},
    ),
    # With new weights less than rounding hides in 16 bits.
    "leak": Case("grouped", "lets the documents of a call influence each other", "lfm2", config={"new_weights": True}),
    "scaled at once": Case("packed", family="longrope", batches=of_widths(13, 2), load={"document_length": 16}),
    "place in a call": Case(
        "grouped",
        "Ministral3Model uses the place of a token in its call (cache_position), not its position",
        "ministral3",
        batches=(batch_of, partial(batch_of, queries=24)),
    ),
}
for _family, _said in (("longrope", "other token embeddings"), ("dynamic rope", "updates its buffers in each call")):
    CASES[f"scaled, {_family}"] = Case("padded", _said, _family, batches=of_widths(13, 2))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_are_those_of_stock(encoder, packed, caplog, case):
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")

    def results(collate):
        """Of a new model each, since scaled positions remember the longest text."""
        core = load_model(encoder(case.family, **case.config), **case.load).double()
        loss_function = case.loss(case.change(core) or core)
        return core, [run(loss_function, batch(core, collate=collate)) for batch in case.batches]

    _, stock = results(features)
    pylate_fastmaxsim.enable(stock_masking=True, **case.options)
    core, ours = results(collated)
    for own, expected in zip(ours, stock, strict=True):
        assert_equal(own, expected)
    assert mode_of(core) == {case.mode}
    lines = [line for line in caplog.messages if line.startswith(("Documents are encoded", "Documents are not"))]
    assert any(case.said in line for line in lines) if case.said else not lines


def test_hooks_of_all_modules_keep_the_padding(model, packed, caplog):
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    of_all = nn.modules.module.register_module_forward_hook
    added = of_all(lambda module, _args, output: cut(output) if module is model else None)
    try:
        stock = run(loss_function, batch)
        pylate_fastmaxsim.enable(stock_masking=True)
        assert_equal(run(loss_function, batch), stock)
    finally:
        added.remove()
    assert "a hook of your own is on all modules" in caplog.text
