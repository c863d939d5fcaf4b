"""A trained adapter for use without this project: as a PEFT folder, or merged into its backbone.

    adapter_config.json, adapter_model.safetensors   the adapter; merged: the files of a model
    tokenizer.json, ..., chat_template.jinja         the tokenizer
    prompt_format.json                               how a prompt becomes the model's input
    README.md                                        a model card: the same in words, a snippet of Python, and
                                                     how the adapter was trained

The tokenizer has a chat template only if prompts are given in it; the day that the template prints
is that of the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from components.config import BackboneConfig, PolicyConfig, SelectorConfig, UserError
from components.data.templates import with_text
from components.io import read_json, write_json
from components.models.adapters import TEMPLATE_FILE
from components.models.backbone import (
    EMBEDDED,
    TINY,
    WHEEL_NAME,
    fetch_backbone,
    is_local,
    load_backbone,
    load_tokenizer,
)
from components.models.generation import find_stop_ids, read_generation_settings
from components.models.peft_folder import check_recorded_layers, read_options
from components.models.policy import PolicyTexts
from components.models.selector import find_choice_tokens
from components.models.tokens import leading_ids

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from transformers import PreTrainedTokenizerBase

FORMAT_FILE = "prompt_format.json"
ADAPTER_CONFIG = "adapter_config.json"


class PromptFormat(TypedDict, total=False):
    """The content of prompt_format.json; a policy and a selector have different parts of it."""

    template: str | None
    leading_ids: list[int]
    choice_ids: list[int]
    max_length: int
    chat: str | None
    system: str | None
    chat_template_kwargs: Mapping[str, Any]
    max_prompt_tokens: int
    truncation_mode: str
    max_new_tokens: int
    stop_ids: list[int]
    pad_id: int | None


def check_export_folder(folder: Path) -> None:
    """Raise an UserError where a folder has files in it, or is a file."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder: name a new one, so that nothing is overwritten")


def open_repository(name: str) -> str:
    """The whole name of a model repository of the hub, which is made, and private, if it is missing.

    Raises:
        UserError: it is public, the hub refuses it, or does not answer.
    """
    with _explained(f"the model repository {name} of the hub cannot be used"):
        api = _hub()
        repository = str(api.create_repo(name, private=True, exist_ok=True).repo_id)
        is_private = api.model_info(repository).private
    if not is_private:
        raise UserError(
            f"the model repository {repository} is public, and an export's README.md has hashes of the data"
            " and figures of its owners: make it private in its settings, or name another one."
        )
    return repository


def push_folder(folder: Path, repository: str) -> str:
    """Upload an export to a repository of `open_repository`.

    Returns:
        the address of the commit.

    Raises:
        UserError: nobody else could load it, the repository has a model of the other kind (an adapter, or a
            merged model), the hub refuses it, or does not answer.
    """
    adapter = folder / ADAPTER_CONFIG
    base = read_json(adapter)["base_model_name_or_path"] if adapter.is_file() else ""
    if Path(base).is_dir():
        raise UserError(
            f"{folder} is written, but not uploaded, since its adapter needs the model in {base} of this"
            " machine: export a whole model into another folder with --merge."
        )
    with _explained(f"{folder} is written, but not uploaded to {repository}"):
        found = {file.rfilename for file in _hub().model_info(repository).siblings or []}
        if found & {"config.json", ADAPTER_CONFIG} - {path.name for path in folder.iterdir()}:
            raise ValueError(
                "it has files of the other kind, an adapter or a merged model: delete them there"
            )
        commit = _hub().upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload an export of fed-rlhf"
        )
    return str(commit.commit_url)


def _hub() -> HfApi:
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the errors of the hub's library, and of the client of HTTP that it chose, into a sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{what} ({reason}): see that the hub can be reached, and that you may write there, by `hf auth"
            " login` or a token in HF_TOKEN."
        ) from None


def export_model(
    adapter: Path,
    model: PolicyConfig | SelectorConfig,
    folder: Path,
    merge: bool,
    training: str = "",
    is_whole: bool = True,
) -> None:
    """Write an adapter, or the backbone with the adapter merged into it, with all that a prompt needs.

    Args:
        adapter: PEFT folder that `export_adapter` wrote.
        training: the last sections of its README, which say how it was trained.
        is_whole: whether no private modules or steps of clients belong to the model.
        merge: write a model for `AutoModelForCausalLM.from_pretrained`, in float32 whatever the section
            says: in bfloat16 most of an adapter would be rounded away. A backbone that was quantized is
            merged as it is without quantization.
    """
    check_export_folder(folder)
    tokenizer, prompt_format = _describe(model)
    folder.mkdir(parents=True, exist_ok=True)
    if merge:
        _write_merged(adapter, model.backbone, prompt_format, folder)
    else:
        for name in ("adapter_model.safetensors", TEMPLATE_FILE):
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, folder / name)  # not the mode 0600, which safetensors gives
        options = read_json(adapter / "adapter_config.json")
        base = fetch_backbone(model.backbone.location)  # PEFT can load the folder of a generated backbone
        write_json(folder / "adapter_config.json", options | {"base_model_name_or_path": base})
    tokenizer.save_pretrained(folder)
    write_json(folder / FORMAT_FILE, prompt_format)
    text = readme(model, prompt_format, merge, is_whole)
    (folder / "README.md").write_text(f"{text}\n{training}" if training else text, encoding="utf-8")


def readme(
    model: PolicyConfig | SelectorConfig, prompt_format: PromptFormat, merged: bool, is_whole: bool
) -> str:
    """The README of an export: the format of its prompts, and a snippet that answers one."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
    return environment.get_template("export.md.j2").render(
        model=model,
        is_policy=isinstance(model, PolicyConfig),
        form=prompt_format,
        merged=merged,
        is_whole=is_whole,
        file=FORMAT_FILE,
        is_on_hub=model.backbone.name not in (EMBEDDED, TINY) and not is_local(model.backbone.location),
        wheel=WHEEL_NAME,
    )


def _describe(model: PolicyConfig | SelectorConfig) -> tuple[PreTrainedTokenizerBase, PromptFormat]:
    """The tokenizer that is exported, and the content of prompt_format.json."""
    if isinstance(model, PolicyConfig):
        return _describe_policy(model)
    tokenizer = load_tokenizer(model.backbone)
    template = cast("str", with_text(model.template).text)
    prompt_format: PromptFormat = {
        "template": template,
        "leading_ids": leading_ids(tokenizer),
        "choice_ids": list(find_choice_tokens(tokenizer, template.rpartition("}")[2])),
        "max_length": model.max_length,
    }
    tokenizer.chat_template = None  # a selector's input is its template alone
    return tokenizer, prompt_format


def _describe_policy(config: PolicyConfig) -> tuple[PreTrainedTokenizerBase, PromptFormat]:
    texts = PolicyTexts(config)
    tokenizer = texts.tokenizer
    prompt_format: PromptFormat = {"template": with_text(config.template).text}
    end_of_turn = None
    if texts.chat is None:
        prompt_format |= {"leading_ids": leading_ids(tokenizer), "chat": None}
        tokenizer.chat_template = None
    else:
        end_of_turn = texts.chat.end_of_turn()
        prompt_format |= {
            "leading_ids": [],
            "chat": config.chat,
            "system": config.system,
            "chat_template_kwargs": texts.chat.template_arguments(),
        }
        if config.chat == "turns":
            prompt_format["template"] = None
        tokenizer.chat_template = with_defaults(
            texts.chat.dated(), texts.chat.template_arguments(), config.system
        )
    settings = read_generation_settings(config.backbone)
    prompt_format |= {
        "max_prompt_tokens": config.max_prompt_tokens,
        "truncation_mode": config.truncation_mode,
        "max_new_tokens": config.max_new_tokens,
        "stop_ids": find_stop_ids(settings, tokenizer, end_of_turn),
        "pad_id": tokenizer.pad_token_id,
    }
    return tokenizer, prompt_format


def with_defaults(template: str, arguments: Mapping[str, Any], system: str | None) -> str:
    """A chat template that has its arguments, and a turn of the system, where it is not given any.

    Servers know neither, and would render another prompt than those that the model was trained on.
    """
    defaults = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in arguments.items()
        if _is_variable(name)
    ]
    if system is not None:
        turn = {"role": "system", "content": system}
        defaults.append(
            f"{{%- if messages[0]['role'] != 'system' %}}{{%- set messages = [{turn!r}] + messages %}}"
            "{%- endif %}"
        )
    return "".join([*defaults, "{{- '' }}", template]) if defaults else template  # its first line end stays


def _is_variable(name: str) -> bool:
    """Whether a chat template can read an argument of this name."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment().parse(f"{{% set {name} = 1 %}}")
    except TemplateSyntaxError:
        return False
    return name.isidentifier()


def _write_merged(adapter: Path, backbone: BackboneConfig, prompt_format: PromptFormat, folder: Path) -> None:
    from peft import PeftModel
    from transformers import GenerationConfig

    whole = backbone.model_copy(update={"quantization": "none", "device_map": None})
    plain: Any = load_backbone(whole, "cpu")
    plain.float()  # the weights that the policy has, which the adapter is added to without rounding
    check_recorded_layers(read_options(adapter), plain.config.num_hidden_layers)
    merged: Any = PeftModel.from_pretrained(plain, adapter).merge_and_unload(safe_merge=True)
    generation_config: Any = GenerationConfig
    merged.generation_config = generation_config(
        eos_token_id=prompt_format.get("stop_ids"), pad_token_id=prompt_format.get("pad_id")
    )
    merged.save_pretrained(folder)
