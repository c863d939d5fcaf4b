"""Prompt templates: the fields and the answer slot of FedBiscuit's figure 4, in our own words, as data files.

A template is a text file under prompt_templates/ (named '<task>/<kind>') or any other file that a recipe names, with
placeholders {prompt}, and for selectors {response_a} and {response_b}, each exactly once. Other braces are plain text.
An instruction of a pairwise judge has Auto-J's placeholders, {prompt}, {response} and {response_another}. A chain of
thoughts has two kinds (DRIFT D.1): the next thought, from {question} and {thoughts} so far; its value, from
{question} and {thought}. A question whose answer is read and compared with the key (DRIFT 7.1) has {question} alone.
A file's trailing white space is dropped, so that a selector's template ends at its answer slot and the next token is
' A' or ' B'.

Figure 4 has two templates for answers to questions, one of them with an input beside the instruction. The prompts of
its data (SHP, SafeRLHF, AlpacaEval) are instructions alone: 'qa/policy'. 'qa/policy_input' has both fields, with an
instruction of its own and the prompt as input, here a conversation; 'summarization/policy' likewise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.config import unknown_name
from components.data.records import DataError

FOLDER = Path(__file__).resolve().parent / "prompt_templates"
FIELDS = {"selector": ("prompt", "response_a", "response_b"), "policy": ("prompt",), "pairwise": ("prompt", "response", "response_another"),
          "thought": ("question", "thoughts"), "value": ("question", "thought"), "answer": ("question",)}
Kind = Literal["selector", "policy", "pairwise", "thought", "value", "answer"]


@dataclass(frozen=True)
class Template:
    """A template, parsed once.

    Attributes:
        name: as the recipe names it.
        kind: one of FIELDS.
        pieces: literal text at even positions and field names at odd ones; starts and ends with literal text, which
            may be empty at the start. Whoever must shorten an input cuts the fields and never the literals.
    """

    name: str
    kind: Kind
    pieces: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names in their order."""
        return self.pieces[1::2]

    def render(self, **values: str) -> str:
        """The template with its fields filled in; braces in the values are left alone.

        Raises:
            KeyError: a field has no value.
        """
        return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(self.pieces))


def names(kind: Kind) -> list[str]:
    """The templates of a kind that ship with the project, e.g. 'summarization/selector'."""
    return sorted(p.relative_to(FOLDER).with_suffix("").as_posix() for p in FOLDER.rglob(f"{kind}*.txt"))


def load(name_or_path: str, kind: Kind) -> Template:
    """Read a template by name or path.

    Raises:
        DataError: there is no such file, or a placeholder is missing, unknown, repeated or in the wrong place; the
            file and the placeholder are named.
    """
    path = next((p for p in (FOLDER / f"{name_or_path}.txt", Path(name_or_path)) if p.is_file()), None)
    if path is None:
        raise DataError(f"{unknown_name(f'{kind} template', name_or_path, names(kind))} A path to a text file works too.")
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except UnicodeDecodeError:
        raise DataError(f"{path}: a template is UTF-8 text, but this file is not") from None
    return parse(text, name_or_path, kind, str(path))


def parse(text: str, name: str, kind: Kind, where: str) -> Template:
    """Parse a template's text; where names it in errors.

    Raises:
        DataError: see load.
    """
    pieces = tuple(re.split(r"\{([A-Za-z_]\w*)\}", text))
    found, wanted = pieces[1::2], FIELDS[kind]
    shown, a = ", ".join(f"{{{field}}}" for field in wanted), "an" if kind == "answer" else "a"
    for field in found:
        if field not in wanted:
            raise DataError(f"{where}: placeholder {{{field}}} is not known in {a} {kind} template; there are: {shown}")
    for field in wanted:
        if found.count(field) != 1:
            raise DataError(f"{where}: {a} {kind} template needs the placeholder {{{field}}} exactly once, but it is there {found.count(field)} times (needed: {shown})")
    if kind in ("selector", "pairwise") and found.index(wanted[1]) > found.index(wanted[2]):
        raise DataError(f"{where}: {{{wanted[1]}}} must come before {{{wanted[2]}}}")
    if kind == "selector" and not pieces[-1].strip():
        raise DataError(f"{where}: a selector template must end with its answer slot, such as '### YOUR CHOICE:', after the last placeholder")
    return Template(name, kind, pieces)


_FORM = re.compile(r"^#+[ \t]*(?:(instruction)|input)[ \t]*:[ \t]*\n?", re.IGNORECASE | re.MULTILINE)
_ANSWER_START = re.compile(r"^#+[ \t]*(?:response[ \t]*:[^{]*|[^\n{]*)\Z", re.IGNORECASE | re.MULTILINE)


def user_message(template: Template, prompt: str) -> str:
    """What a user would have asked for what a policy's template asks of the model: its instruction, with the prompt filled in.

    Of Alpaca's form (headings '### Instruction:', '### Input:', '### Response:') the contents stay and the headings go, with
    the sentence before them that says how to read the form. An answer start at the end ('### Response:', or any heading with
    nothing behind it) goes, too. Other text stays as it is, and so does the prompt, whatever it holds. A template with no
    instruction of its own gives the prompt.

    Args:
        template: of the kind 'policy'.
        prompt: of a data record.
    """
    slot = "{prompt}"  # stands in a policy's template exactly once
    text = _ANSWER_START.sub("", template.render(prompt=slot))
    headings = list(_FORM.finditer(text))
    if any(heading[1] for heading in headings) and slot not in text[: headings[0].start()]:
        text = text[headings[0].start():]
    before, after = _FORM.sub("", text).strip().split(slot)
    return f"{before}{prompt}{after}"
