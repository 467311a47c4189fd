"""What the package reaches into the hosts for and no documented API promises: an upgrade that takes it away fails here.

Of names with an underscore the list is complete, which the last test sees to. The others are listed where a renamed one
would not be an error but turn something off. Names that are imported or patched fail by themselves.
"""

import ast
import importlib.util
import inspect
import re
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')
pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from colpali_engine.loss.late_interaction_losses import ColbertModule
from datasets import Dataset
from peft import PeftModel
from pylate.models import ColBERT
from pylate.scores import XTRScores
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.models import Transformer
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from transformers import Trainer, TrainingArguments

import pylate_fastmaxsim

PACKAGE = Path(pylate_fastmaxsim.__file__).parent


def own(kind: type) -> SimpleNamespace:
    names = re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(kind))
    return SimpleNamespace(**dict.fromkeys(names, True), __name__=kind.__name__)


def checkpointed_layer() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    encoder = transformers.BertModel(transformers.BertConfig(**sizes))
    encoder.gradient_checkpointing_enable()
    return encoder.encoder.layer[0]


def inside_fsdp() -> nn.Module:
    linear = nn.Linear(1, 1)
    _annotate_modules_for_dynamo(linear, set(), use_orig_params=True)
    return linear


LINEAR = nn.Linear(1, 1)

# What has it: the names, and what needs them.
NAMES = [
    (LINEAR, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks", "own code, and trials undone"),
    (LINEAR, "_buffers _modules", "trials undone"),
    (LINEAR, "_compiled_call_impl _call_impl", "compiled layers"),
    (LINEAR, "_parameters", "small batches as CUDA graphs"),
    (ArgumentParser(), "_actions", "completion in a shell"),
    (torch, "_foreach_copy_", "small batches as CUDA graphs"),
    (torch._C, "_cuda_endAllocateToPool", "small batches as CUDA graphs"),
    (LINEAR.weight, "_backward_hooks _post_accumulate_grad_hooks", "own code"),
    (LINEAR.weight, "_version", "changed masks"),
    (torch.zeros(1).to_sparse(), "_indices _values", "sparse embeddings that are not coalesced"),
    (add_hook_to_module(nn.Linear(1, 1), ModelHook()), "_hf_hook", "own code"),
    (nn.modules.module, "_global_forward_hooks _global_forward_pre_hooks", "own code"),
    (nn.modules.module, "_global_backward_hooks _global_backward_pre_hooks", "own code"),
    (nn.modules.batchnorm, "_BatchNorm", "encoders that are divided as stock divides them"),
    (nn.modules.dropout, "_DropoutNd", "compiled checkpointing"),
    (parametrize, "_cache_enabled", "trials undone"),
    (torch.utils, "_pytree", "the answer of a fused head"),
    (own(DistributedDataParallel), "require_backward_grad_sync broadcast_buffers modules_buffers", "ranks in step"),
    (own(DistributedDataParallel), "process_group static_graph", "ranks in step"),
    (torch.ops.aten, "_flash_attention_forward", "packed attention"),
    (forward_ad, "_current_level", "the refusal of forward mode"),
    (torch, "_C _dynamo", "operators in transforms, compiled layers"),
    (torch._C, "_functorch _is_tracing _len_torch_dispatch_stack", "operators in graphs, modes and transforms"),
    (torch._C._functorch, "peek_interpreter_stack is_batchedtensor is_legacy_batchedtensor", "operators in transforms"),
    (torch._C._functorch, "is_functorch_wrapped_tensor is_gradtrackingtensor get_unwrapped", "no torch.func"),
    (torch._dynamo, "maybe_mark_dynamic", "compiled layers"),
    (torch._dynamo.config, "recompile_limit optimize_ddp skip_nnmodule_hook_guards", "compiled layers"),
    (torch._dynamo.config, "skip_tensor_guards_with_matching_dict_tags", "compiled layers"),
    (torch.compile(LINEAR), "_orig_mod", "the model inside what is compiled"),
    (torch.compile(len), "_torchdynamo_orig_callable", "compiled XTR scores"),
    (torch.compiler.assume_constant_result(lambda: None), "_dynamo_marked_constant", "operators in graphs"),
    (transformers.BertConfig(), "_attn_implementation", "packed attention"),
    (transformers.PreTrainedModel, "_supports_sdpa", "the advice where attention cannot be packed"),
    (checkpointed_layer(), "_gradient_checkpointing_func gradient_checkpointing", "compiled checkpointing"),
    (transformers.masking_utils, "_ignore_bidirectional_mask_sdpa _ignore_causal_mask_sdpa", "masks_unread masks"),
    (transformers, "AttentionInterface", "packed attention"),
    (transformers.Gemma3nTextConfig(), "num_kv_shared_layers", "decoders without a cache"),
    (transformers.modeling_layers, "GradientCheckpointingLayer", "compiled checkpointing"),
    (transformers.utils.output_capturing, "maybe_install_capturing_hooks", "outputs of compiled layers"),
    (Trainer, "_init_training_state _load_from_checkpoint _load_optimizer_and_scheduler", "recipes that go on"),
    (Trainer, "_load_rng_state _save _save_rng_state", "recipes that go on"),
    (TrainingArguments("out", use_cpu=True), "_n_gpu _setup_devices", "the arguments of a recipe"),
    (SentenceTransformerTrainer, "_prepare_inputs", "what the collator leaves with a batch"),
    (own(SentenceTransformerTrainer), "_train_dataloader", "recipes that go on"),
    (ColBERT, "_first_module skiplist_mask", "every loss"),
    (ColBERT, "_create_model_card", "the card of a recipe"),
    (own(Transformer), "auto_model model_forward_params", "packing"),
    (PeftModel, "get_base_model", "the model inside adapters"),
    (nn.Linear(1, 1)._replicate_for_data_parallel(), "_is_replica", "a MultiVectorEncoder in DataParallel"),
    (inside_fsdp(), "_is_fsdp_managed_module", "a SparseEncoder in FSDP"),
    (XTRScores, "_score", "XTR scores"),
    (ColbertModule, "_aggregate _apply_normalization _inbatch_scores _smooth_max", "losses of colpali-engine"),
    (Dataset.from_dict({}), "_fingerprint", "the cache of distillation data"),
]

if importlib.util.find_spec("triton") and (
    # Which releases have them is said nowhere else.
    importlib.import_module("pylate_fastmaxsim.kernels.runtime.cached_launch")._KNOWN
):
    import triton
    from triton.compiler import CompiledKernel

    NAMES += [
        (triton.knobs.runtime.launch_enter_hook, "calls", "short launches"),
        (type(triton.runtime.driver), "active", "short launches"),
        (own(triton.runtime.JITFunction), "arg_names", "short launches"),
        (own(CompiledKernel), "function packed_metadata", "short launches"),
        (CompiledKernel, "run", "short launches"),
    ]

# Of Sentence Transformers 6: where it is installed, the tests of MultiVectorEncoder fail without them.
OF_MULTI_VECTOR = "_convert_to_tensor _create_minibatch _declared_forward_params _fill_empty_document_scores"
OF_MULTI_VECTOR += " _query_token_counts _zero_row_mask"
# mteb has it for models of others, which test_mteb.py runs where it is installed.
OF_MTEB = "_create_dataloaders"
# Strings that look like private names, and what named tuples have. _exit is of os.
NO_NAMES = "_FORWARD_WITH_WINNERS _arguments _attention_mask _exit _id _input_ids _kl_divergence _regularizer"
NO_NAMES += " _regularizer_threshold _mask _threshold _tiles _vendor _asdict _fields _replace"


@pytest.mark.parametrize("owner, names, needs", NAMES, ids=[f"{entry[1]}".split()[0] for entry in NAMES])
def test_private_names_are_there(owner, names, needs):
    gone = [name for name in names.split() if not hasattr(owner, name)]
    assert not gone, f"{', '.join(gone)} of {owner} is gone, which this needs: {needs}."


def taken_from_others(text: str, defined: set[str]) -> set[str]:
    """Private names of a file's code that it imports, takes from other objects than itself, or has as text."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pylate_fastmaxsim"):
            found |= {*(node.module or "").split("."), *(each.name for each in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found - defined if re.fullmatch(r"_[A-Za-z]\w*", name)}


def test_the_list_is_complete():
    texts = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    # Functions, classes, what objects are given as their own, and what modules and classes hold.
    define = r"(?:def |class |self\.|cls\.)(_[A-Za-z]\w*)|^ *(_[A-Za-z]\w*)(?:: [^=\n]+)?(?: = |$)"
    defined = {name for text in texts.values() for found in re.findall(define, text, re.MULTILINE) for name in found}
    listed = set(" ".join([*(names for _, names, _ in NAMES), NO_NAMES, OF_MULTI_VECTOR, OF_MTEB]).split())
    for file, text in texts.items():
        more = taken_from_others(text, defined) - listed
        assert not more, f"{file.relative_to(PACKAGE)} needs {', '.join(sorted(more))}, which NAMES does not have."
