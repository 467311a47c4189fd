"""A small encoder with random weights and rows of made-up words, so that the examples download nothing."""

import random
import statistics
import tempfile
import time

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast, TrainerCallback

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
WORDS = [f"w{number}" for number in range(10_000)]


def encoder(masked_lm: bool = False) -> str:
    """The folder of a small ModernBERT and its tokenizer; ``masked_lm``: with the head that SPLADE needs."""
    folder = tempfile.mkdtemp()
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=300, **SPECIAL).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ModernBertForMaskedLM(ModernBertConfig(vocab_size=10_100, pad_token_id=1, **sizes))
    (model if masked_lm else model.model).save_pretrained(folder)
    return folder


def document(draw: random.Random) -> str:
    """60 words on average; the longest text of a batch decides how wide it is padded."""
    return " ".join(draw.choices(WORDS, k=min(290, 1 + int(draw.expovariate(1 / 60)))))


def rows(count: int, negatives: int = 1) -> list[dict[str, str]]:
    """Rows of a query, a document that has its words, and others, all in columns of their own."""
    draw, made = random.Random(0), []
    for _ in range(count):
        texts = {"positive": document(draw)} | {f"negative_{n}": document(draw) for n in range(1, 1 + negatives)}
        made.append({"query": " ".join(texts["positive"].split()[:8])} | texts)
    return made


class StepTimes(TrainerCallback):
    """Measures the steps of a trainer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__):
        self.begin = now()

    def on_step_end(self, *_, **__):
        self.seconds.append(now() - self.begin)

    def __str__(self) -> str:
        return f"{1000 * statistics.median(self.seconds):.0f} ms a step"


def now() -> float:
    """Seconds, after all that a GPU has been asked to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
