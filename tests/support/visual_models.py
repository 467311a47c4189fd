"""Tiny ColPali and ColQwen2 with random weights, processors made on the spot, and pages drawn by the test."""

from collections.abc import Sequence
from pathlib import Path

import torch
from colpali_engine.models import ColPali, ColPaliProcessor, ColQwen2, ColQwen2Processor
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PaliGemmaConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    SiglipImageProcessor,
)

from tests.support.models import TEXT

IMAGE_SIZE = 56  # of ColPali, in pixels: 4 x 4 patches


def build_visual_model(folder: Path, kind: str) -> str:
    torch.manual_seed(0)
    processor = _colqwen2_processor() if kind == "colqwen2" else _colpali_processor()
    model = _colqwen2(processor) if kind == "colqwen2" else _colpali(processor)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # The usual scale of 0.02 makes attention all but uniform.
                weight.normal_(std=0.3 if "embed" in name else weight.shape[1] ** -0.5)
    model.save_pretrained(folder, save_original_format=False)
    processor.save_pretrained(folder)
    return str(folder)


def page(number: int) -> Image.Image:
    width, height = 56 + 28 * (number % 3), 84 - 28 * (number % 2)
    image = Image.new("RGB", (width, height), (250, 250, 240 - number % 40))
    draw = ImageDraw.Draw(image)
    for line in range(5):
        left = (number * 7 + line * 11) % 30
        colour = tuple((number * 37 + line * 53 + channel * 91) % 256 for channel in range(3))
        draw.rectangle((left, 4 + line * 10, left + 10 + number % 13, 10 + line * 10), fill=colour)
    return image


def _tokenizer(special: Sequence[str], **names: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), **options)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _colqwen2_processor() -> ColQwen2Processor:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    pixels = {"min_pixels": 28 * 28, "max_pixels": 9 * 28 * 28}
    return ColQwen2Processor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
    )


def _decoder(tokenizer: PreTrainedTokenizerFast, **values: object) -> dict:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {"vocab_size": len(tokenizer), **sizes, **heads, **tokens, **values}


def _colqwen2(processor: ColQwen2Processor) -> ColQwen2:
    token = processor.tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(
        text_config=_decoder(processor.tokenizer, rope_parameters=rope, attention_dropout=0.0),
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    return ColQwen2(config)


def _colpali_processor() -> ColPaliProcessor:
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<image>"]
    tokenizer = _tokenizer(special, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    image_processor = SiglipImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    image_processor.image_seq_length = (IMAGE_SIZE // 14) ** 2
    return ColPaliProcessor(image_processor=image_processor, tokenizer=tokenizer)


def _colpali(processor: ColPaliProcessor) -> ColPali:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "siglip_vision_model", "image_size": IMAGE_SIZE, "patch_size": 14}
    vision["vision_use_head"] = False
    config = PaliGemmaConfig(
        text_config=_decoder(processor.tokenizer, model_type="gemma", head_dim=16),
        vision_config=vision,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
        hidden_size=32,
    )
    return ColPali(config)
