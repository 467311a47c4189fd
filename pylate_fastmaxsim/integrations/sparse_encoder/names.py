"""Names that a SparseEncoder's modules have in the releases of Sentence Transformers."""

from torch import nn

try:
    from sentence_transformers.base.modules import Router
    from sentence_transformers.base.modules import Transformer as MaskedLanguageModel
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseStaticEmbedding, SpladePooling

    DIMENSION = "embedding_dimension"
except ImportError:  # before release 5.4
    from sentence_transformers.models import Router
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SparseStaticEmbedding, SpladePooling

    MaskedLanguageModel = MLMTransformer

    DIMENSION = "word_embedding_dimension"

# What a masked language model gives of texts, as its `modality_config` has it from release 5.4 on.
LOGITS = {"method": "forward", "method_output_name": "logits"}

__all__ = [
    "DIMENSION",
    "LOGITS",
    "MLMTransformer",
    "MaskedLanguageModel",
    "Router",
    "SparseStaticEmbedding",
    "SpladePooling",
    "gives_logits",
]


def gives_logits(transformer: nn.Module) -> bool:
    """True of a masked language model. From release 5.4 on the class has other models as well."""
    return getattr(transformer, "transformer_task", "fill-mask") == "fill-mask"
