"""Architectures of torchvision, timm and transformers: random weights, small sizes, nothing downloaded.

A builder returns a model and its inputs, both seeded. None is imported here before it is asked for.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BATCH, CLASSES, TOKENS, LENGTH = 4, 10, 64, 12
Built = tuple[nn.Module, dict[str, Any]]
_LIBRARY: list[torch.library.Library] = []  # a definition lasts as long as its Library


def torchvision() -> Any:
    """The wheels on PyPI are for CUDA: beside a CPU build of torch, operators for boxes are missing."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        _LIBRARY.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            _LIBRARY[0].define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        return importlib.import_module("torchvision")


def _images(*shape: int, batch: int = 2 * BATCH) -> Tensor:
    return torch.randn(batch, *shape)


def vision(home: str, name: str, size: int = 64, **options: Any) -> Built:
    models = importlib.import_module(f"{torchvision().__name__}.models{home}")
    model = getattr(models, name)(num_classes=CLASSES, **options)
    return model, {"x": _images(3, size, size)}


def timm(name: str, size: int = 64, **options: Any) -> Built:
    torchvision()
    model = importlib.import_module("timm").create_model(name, num_classes=CLASSES, **options)
    return model, {"x": _images(3, size, size)}


def transformer(config: str, model: str, inputs: str = "tokens", **options: Any) -> Built:
    if importlib.util.find_spec("torchvision"):  # which transformers imports where it is
        torchvision()
    library = importlib.import_module("transformers")
    made = getattr(library, config)(**SMALL | NO_DROPOUT | options)
    tokens = torch.randint(3, TOKENS, (BATCH, LENGTH))
    given = {
        "tokens": {"input_ids": tokens},
        "both": {"input_ids": tokens, "decoder_input_ids": tokens},
        "large image": {"pixel_values": _images(3, 64, 64, batch=BATCH)},
        "image": {"pixel_values": _images(3, 32, 32, batch=BATCH)},
        "sound": {"input_values": _images(4000, batch=BATCH)},
        "pairs": {"input_ids": tokens, "pixel_values": _images(3, 32, 32, batch=BATCH)},
        "mel": {"input_features": _images(80, 60, batch=BATCH), "decoder_input_ids": tokens},
    }
    return getattr(library, model)(made), given[inputs]


NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout"),
        *(
            "dropout",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "summary_first_dropout",
            "classifier_dropout",
        ),
        *("activation_dropout", "feat_proj_dropout", "layerdrop", "dropout_rate", "embed_dropout"),
        *("resid_dropout", "drop_path_rate", "mask_time_prob", "final_dropout", "encoder_layerdrop"),
        *("decoder_layerdrop", "classifier_dropout_prob", "residual_dropout", "hidden_dropout_rate"),
    ),
    0.0,
)
SMALL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
    "initializer_range": 0.2,  # 0.02 is for wide layers: from these, gradients would vanish
    "init_std": 0.2,
}


VISION = ["squeezenet1_1", "mobilenet_v3_small", "resnet18", "efficientnet_b0"]
TIMM = ["resnet10t", "tinynet_e", "lcnet_050", "mobilevit_xxs", "edgenext_xx_small", "convnext_atto"]
TIMM += ["convnextv2_atto", "starnet_s1", "efficientvit_b0", "pvt_v2_b0"]
PATCHES = ["vit_tiny_patch16_224", "mixer_s32_224", "xcit_nano_12_p16_224", "gmlp_ti16_224", "levit_128s"]


def _vision() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in VISION:
        yield name, partial(vision, "", name)
    yield "googlenet", partial(vision, "", "googlenet", aux_logits=False, init_weights=False)
    size = {
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 64,
        "image_size": 32,
        "patch_size": 8,
    }
    yield "vit", partial(vision, ".vision_transformer", "VisionTransformer", 32, **size)
    segmentation = {"weights_backbone": None}
    yield "lraspp", partial(vision, ".segmentation", "lraspp_mobilenet_v3_large", **segmentation)


def _timm() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in TIMM:
        yield name, partial(timm, name)
    for name in PATCHES:
        yield name, partial(timm, name, img_size=64)


ENCODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
ENCODER |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1}
MOE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
WAVES: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
}
WAVES |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}


def _transformers() -> Iterator[tuple[str, Callable[[], Built]]]:
    one = "SequenceClassification"
    for name in ["Bert", "Roberta", "Electra", "DebertaV2", "MPNet", "Albert", "ConvBert", "BigBird"]:
        yield name, partial(transformer, f"{name}Config", f"{name}For{one}", embedding_size=32)
    yield (
        "DistilBert",
        partial(
            transformer,
            "DistilBertConfig",
            f"DistilBertFor{one}",
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
        ),
    )
    mobile = {
        "initializer_range": 0.02,
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "true_hidden_size": 32,
    }
    yield "MobileBert", partial(transformer, "MobileBertConfig", f"MobileBertFor{one}", **mobile)
    for name in [
        "Llama",
        "Mistral",
        "Qwen2",
        "Qwen3",
        "Gemma",
        "Gemma2",
        "Phi",
        "StableLm",
        "Starcoder2",
        "Olmo2",
        "Cohere",
        "GPTNeoX",
        "Mamba",
    ]:
        yield name, partial(transformer, f"{name}Config", f"{name}ForCausalLM", head_dim=8)
    for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe"):
        yield name, partial(transformer, f"{name}Config", f"{name}ForCausalLM", **MOE, head_dim=8)
    for name, head in (("GPT2", "GPT2LMHeadModel"), ("GPTJ", "GPTJForCausalLM")):
        more = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
        yield name, partial(transformer, f"{name}Config", head, **more)
    neo = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    yield "GPTNeo", partial(transformer, "GPTNeoConfig", "GPTNeoForCausalLM", **neo)
    yield "Bloom", partial(transformer, "BloomConfig", "BloomForCausalLM", n_layer=2, n_head=4)
    opt = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    yield "OPT", partial(transformer, "OPTConfig", "OPTForCausalLM", **opt)
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    yield "T5", partial(transformer, "T5Config", "T5ForConditionalGeneration", "both", **t5)
    yield "Bart", partial(transformer, "BartConfig", "BartForConditionalGeneration", "both", **ENCODER)
    yield (
        "Whisper",
        partial(
            transformer,
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            "mel",
            **ENCODER | {"max_source_positions": 30, "max_target_positions": 64},
        ),
    )
    yield (
        "Wav2Vec2",
        partial(transformer, "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", "sound", **WAVES),
    )
    for name in ("ViT", "DeiT", "Beit", "Dinov2"):
        # 1e-12 over tokens of zeros, as they begin in two of them, makes gradients of 4e5 at any loss scale
        norm = {"layer_norm_eps": 1e-6}
        yield name, partial(transformer, f"{name}Config", f"{name}ForImageClassification", "image", **norm)
    swin = {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "window_size": 4,
        "patch_size": 2,
        "image_size": 32,
    }
    yield "Swin", partial(transformer, "SwinConfig", "SwinForImageClassification", "image", **swin)
    segformer: dict[str, Any] = {"image_size": 64}  # or a kernel would cover all of it
    segformer |= {
        "hidden_sizes": [8, 16, 16, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
    }
    yield (
        "Segformer",
        partial(
            transformer, "SegformerConfig", "SegformerForImageClassification", "large image", **segformer
        ),
    )
    part = {
        key: SMALL[key]
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    }
    clip = {
        "text_config": {**SMALL, **part},
        "vision_config": {**part, "image_size": 32, "patch_size": 8},
        "projection_dim": 16,
    }
    yield "CLIP", partial(transformer, "CLIPConfig", "CLIPModel", "pairs", **clip)


FAMILIES: dict[str, dict[str, Callable[[], Built]]] = {
    "torchvision": dict(_vision()),
    "timm": dict(_timm()),
    "transformers": dict(_transformers()),
}


def build(family: str, name: str) -> Built:
    """The model in training mode and its inputs; without dropout, whose masks would differ by dtype."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family][name]()
    for module in model.modules():
        for attribute in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    if "x" in inputs:  # whatever the model calls its image
        inputs = {next(iter(inspect.signature(model.forward).parameters)): inputs["x"]}
    return model.train(), inputs


def logits(output: Any) -> Tensor:
    """The scores of a model, in fp32, [samples, classes]."""
    if not isinstance(output, Tensor):
        keys = ("logits", "logits_per_image", "out")
        found = [output[key] for key in keys if key in output] if hasattr(output, "keys") else list(output)
        output = found[0]
    output = output.float()
    return output.movedim(1, -1).flatten(0, -2) if output.ndim == 4 else output.flatten(0, -2)
