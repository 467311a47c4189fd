"""Tiny encoders with random weights and tokenizers trained on the spot, so that nothing is downloaded."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BigBirdConfig,
    CLIPTextConfig,
    ConvBertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    FNetConfig,
    Gemma3nTextConfig,
    GPT2Config,
    IBertConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
    XLMRobertaConfig,
)

TEXT = """
Late interaction keeps one vector for every token of a document, and compares each of them with each
token of the query. The largest similarity of a query token is its contribution to the score; a document's
score is the sum over the query. Padding wastes most of the work: texts differ in length, a batch does not.
Rivers carry sand from the mountains to the sea, where waves sort it by size! Why is the sky blue? Because
small particles scatter short waves more than long ones. A sorted list can be searched by halving it again
and again; the number of steps grows with the logarithm of its length (that is, slowly). Bread rises when
yeast turns sugar into gas. In 1969 two people walked on the moon: it was dusty. Bees tell each other where
flowers are by dancing. Compilers translate programs, linkers put them together, and loaders start them.
"""


def sentences(count: int, longest: int = 40, seed: int = 0) -> list[str]:
    """Texts of very uneven length, from 1 word to ``longest``."""
    words = TEXT.split()
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(count, generator=generator).square() * longest).long() + 1
    starts = torch.randint(len(words) - longest, (count,), generator=generator)
    return [" ".join(words[s : s + n]) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


class Behind(nn.Module):
    """A module of somebody's own in the place of a model's Dense, which it calls before it changes the features."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.change(self.dense(features))


def looking(hook: Callable) -> Callable:
    """A hook that only looks at calls, as one of a library: one of somebody's own would keep the padding."""
    return FunctionType(hook.__code__, {**hook.__globals__, "__name__": "torch"}, closure=hook.__closure__)


def build_model(folder: Path, family: str, new_weights: bool = False, masked_lm: bool = False, **changes) -> str:
    """Save a tiny encoder without dropout, but for ``changes`` of its configuration, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(family)
    kind = AutoModelForMaskedLM if masked_lm else AutoModel
    encoder = kind.from_config(_config(family, len(tokenizer), tokenizer.pad_token_id, changes))
    with torch.no_grad():
        if masked_lm:
            # Some terms of a text are positive, and some are not.
            encoder.get_output_embeddings().bias.normal_(mean=-2.0)
        for name, weight in encoder.named_parameters():
            if weight.dim() == 2 and not new_weights:
                # The usual scale of 0.02 makes attention all but uniform, and errors in it invisible.
                weight.normal_(std=0.3 if "embed" in name else weight.shape[1] ** -0.5)
    encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load_model(path: str, document_length: int = 32, query_length: int = 12, device: str = "cpu", **options: object):
    from pylate.models import ColBERT

    torch.manual_seed(0)
    options |= {"document_length": document_length, "query_length": query_length, "device": device}
    return ColBERT(model_name_or_path=path, embedding_size=16, **options).train()


def checkpointed(model: Sequence[nn.Module], reentrant: bool = False) -> None:
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model[0].auto_model.enable_input_require_grads()


def features(model, queries: Sequence[str], *columns: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """A tokenized batch without what our collator adds."""
    batch = [model.tokenize(list(queries), is_query=True, pad=True)]
    batch += [model.tokenize(list(column), is_query=False, pad=True) for column in columns]
    return [{key: value.to(model.device) for key, value in column.items()} for column in batch]


def collated(model, queries: Sequence, *columns: Sequence, **options: object) -> list[dict]:
    """The same batch from PyLate's collator with its ``options``, as the trainer hands it to a loss."""
    from pylate.utils import ColBERTCollator

    names = ["query", *(f"document_{index}" for index in range(len(columns)))]
    rows = [dict(zip(names, row, strict=True)) for row in zip(queries, *columns, strict=True)]
    batch = ColBERTCollator(tokenize_fn=model.tokenize, **options)(rows)
    batch = {key: value.to(model.device) if torch.is_tensor(value) else value for key, value in batch.items()}
    parts = [{key: value for key, value in batch.items() if key.startswith(f"{name}_")} for name in names]
    return [{k.removeprefix(f"{name}_"): v for k, v in part.items()} for name, part in zip(names, parts, strict=True)]


def attend_to_own_document(query, key, value, cu_seqlens, max_length, *, scale, window, dropout, key_cu_seqlens=None):
    """What FlashAttention computes for packed texts, on any device and with a mask of all pairs."""
    assert torch.compiler.is_compiling() or cu_seqlens.diff().max() <= max_length
    key_cu_seqlens = cu_seqlens if key_cu_seqlens is None else key_cu_seqlens
    row, key_row = (torch.arange(states.shape[0], device=states.device) for states in (query, key))
    text = torch.searchsorted(cu_seqlens, row, right=True)
    key_text = torch.searchsorted(key_cu_seqlens, key_row, right=True)
    # Where a text has fewer keys than rows, their ends are aligned.
    distance = (row - cu_seqlens[text])[:, None] - (key_row - key_cu_seqlens[key_text])
    seen = text[:, None] == key_text
    left, right = window
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    states = (part.transpose(0, 1) for part in (query, key, value))
    output = F.scaled_dot_product_attention(
        *states, attn_mask=seen, scale=scale, dropout_p=dropout, enable_gqa=key.shape[1] != query.shape[1]
    )
    return output.transpose(0, 1)


_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GROUPED = {"num_key_value_heads": 1, "head_dim": 16}
# With these, texts of more than 16 tokens have their rotary positions scaled, and so have those in one call with such
# a text.
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LONG = {**_DYNAMIC, "rope_type": "longrope", "original_max_position_embeddings": 16}
_LONG |= {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
# Attention is sharpened from the 256th token of a row on, as by the model that was published from the 16,384th.
_SHARPENED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256}
_SHARPENED |= {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
# Local layers see 4 tokens to each side: less than most documents have.
_LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 2, "max_position_embeddings": 128}
# Texts of more than 28 tokens attend to blocks of 4 tokens; a batch of shorter ones has the encoder attend to all for good.
_BLOCKS = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
_RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
# T5 has names of its own for these sizes.
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
# Two of the layers are convolutions over neighbouring tokens.
_CONVOLVED = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
_GEMMA = {"laurel_rank": 4, "hidden_size_per_layer_input": 8, "sliding_window": 8}

_CONFIGS = {
    "modernbert": (ModernBertConfig, _LOCAL),
    "bert": (BertConfig, _UNDROPPED),
    "xlm-roberta": (XLMRobertaConfig, _UNDROPPED | {"type_vocab_size": 1}),
    "mpnet": (MPNetConfig, _UNDROPPED),
    "convbert": (ConvBertConfig, _UNDROPPED | {"embedding_size": 32}),
    "fnet": (FNetConfig, {"hidden_dropout_prob": 0.0}),
    "bigbird": (BigBirdConfig, _UNDROPPED | _BLOCKS),
    # These four are drawn by tools/fuzz.py.
    "deberta": (DebertaV2Config, _UNDROPPED | _RELATIVE),
    "electra": (ElectraConfig, _UNDROPPED | {"embedding_size": 16}),
    "t5": (T5Config, _T5),
    "llama": (LlamaConfig, {"num_key_value_heads": 1}),
    "longrope": (LlamaConfig, {"rope_parameters": _LONG}),
    "dynamic rope": (LlamaConfig, {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}),
    "lfm2": (Lfm2Config, _CONVOLVED | {"num_key_value_heads": 1}),
    "ibert": (IBertConfig, _UNDROPPED | {"type_vocab_size": 1}),
    "clip": (CLIPTextConfig, {"attention_dropout": 0.0}),
    "gpt2": (GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "qwen3": (Qwen3Config, _GROUPED),  # causal, and both heads share their keys and values
    "gemma3n": (Gemma3nTextConfig, _GROUPED | _GEMMA),
    "ministral3": (Ministral3Config, _GROUPED | {"rope_parameters": _SHARPENED, "max_position_embeddings": 4096}),
    "distilbert": (DistilBertConfig, {"hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}),
}


def _config(family: str, vocabulary: int, padding: int, changes: dict):
    config, own = _CONFIGS[family]
    common = {"vocab_size": vocabulary, "pad_token_id": padding, "hidden_size": 32, "intermediate_size": 48}
    common |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    if family == "gemma3n":
        common["vocab_size_per_layer_input"] = vocabulary + 8
    return config(**{**common, **copy.deepcopy(own), **changes})


def _word_pieces(special: list[str]) -> dict[str, int]:
    words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(TEXT.lower())]
    pieces = Counter(piece for word in words for piece in (word[:4], "##" + word[4:]) if piece != "##")
    letters = sorted(set("".join(words)))
    common = sorted(pieces, key=lambda piece: (-pieces[piece], piece))
    vocabulary = dict.fromkeys([*special, *letters, *("##" + letter for letter in letters), *common])
    return {piece: number for number, piece in enumerate(list(vocabulary)[:300])}


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    roberta = family in ("xlm-roberta", "mpnet", "ibert")
    begin, padding, end, unknown, mask = (
        ("<s>", "<pad>", "</s>", "<unk>", "<mask>") if roberta else ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
    )
    special = [begin, padding, end, unknown, mask] if roberta else [padding, begin, end, unknown, mask]
    bpe = family == "modernbert"
    model = models.BPE(unk_token=unknown) if bpe else models.WordPiece(_word_pieces(special), unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if bpe:
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator([TEXT], trainer)
    else:
        tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    names = ["input_ids", "attention_mask"]
    if family == "bert":
        names.insert(1, "token_type_ids")
    tokens = {"cls_token": begin, "pad_token": padding, "sep_token": end, "unk_token": unknown, "mask_token": mask}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, model_max_length=64, **tokens)
