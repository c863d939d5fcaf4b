"""Prompt templates: the fields and the answer slot of FedBiscuit's figure 4, with own wording.

A template is a text file under prompt_templates/ (named '<task>/<kind>') or any other file that a
recipe names, with placeholders {prompt}, and for selectors {response_a} and {response_b}, each
exactly once. In place of {prompt}, a selector's may have {headed_post}: a forum post of the source
tldr whose fields SUBREDDIT, TITLE and POST have the headings of the figure. Other braces are plain
text. An instruction of a pairwise judge has Auto-J's
placeholders, {prompt}, {response} and {response_another}. A chain of thoughts has two kinds (DRIFT
D.1): the next thought, with {question} and {thoughts} so far; its value, with {question} and
{thought}. A question whose answer is compared with the key (DRIFT 7.1) has {question} alone. A
file's trailing white space is removed, so that a selector's template ends at its answer slot and
the next token is ' A' or ' B'.

Figure 4 has two templates for answers to questions, one of them with an input beside the
instruction. The prompts of its data (SHP, SafeRLHF, AlpacaEval) are instructions alone:
'qa/policy'. 'qa/policy_input' has both fields, with an instruction of its own and the prompt as
input, here a conversation; 'summarization/policy' likewise. 'alpaca/policy' and
'alpaca/policy_summary' have the words of Alpaca's training, for policies that are fine-tuned on it;
the second has the figure's instruction for summaries. 'dialogue/policy' is a dialogue of HH-RLHF.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from components.config import TemplateFile, unknown_name
from components.data.records import DataError

FOLDER = Path(__file__).resolve().parent / "prompt_templates"
FIELDS = {
    "selector": ("prompt", "response_a", "response_b"),
    "policy": ("prompt",),
    "pairwise": ("prompt", "response", "response_another"),
    "thought": ("question", "thoughts"),
    "value": ("question", "thought"),
    "answer": ("question",),
}
Kind = Literal["selector", "policy", "pairwise", "thought", "value", "answer"]


_POST = re.compile(r"\ASUBREDDIT: (.*)\nTITLE: (.*)\nPOST: ?")


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    name: str  # as the recipe names it
    kind: Kind
    # Literal text at even positions and field names at odd ones; starts and ends with literal text, which
    # may be empty at the start. An input that is too long is shortened in its fields, never in its literals.
    pieces: tuple[str, ...]
    is_headed: bool = False  # whether a selector's field prompt is {headed_post} in the file

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names in their order."""
        return self.pieces[1::2]

    def render(self, **values: str) -> str:
        """Fill in the fields; braces in the values are plain text.

        Raises:
            KeyError: a field has no value.
        """
        return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(self.pieces))

    def show_prompt(self, prompt: str) -> str:
        """A prompt as the field prompt of a selector's template shows it."""
        if not self.is_headed:
            return prompt
        shown, count = _POST.subn(r"### SUBREDDIT: \1\n### TITLE: \2\n### POST: ", prompt, count=1)
        if count == 0:
            raise DataError(
                f"the template '{self.name}' shows posts that begin with lines 'SUBREDDIT: ', 'TITLE: ' and"
                " 'POST: ', as those of the source tldr do, and a prompt does not: use a"
                " template with {prompt}"
            )
        return shown


def names(kind: Kind) -> list[str]:
    """Names of the project's templates of a kind, e.g. 'summarization/selector'."""
    paths = FOLDER.rglob(f"{kind}*.txt")
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in paths)


def load(template: TemplateFile | str, kind: Kind) -> Template:
    """Parse a template that has its text, or read one by its name or path."""
    file = TemplateFile(template) if isinstance(template, str) else template
    if file.text is not None:
        return parse(file.text, file.name, kind, file.name)
    path = find(file.name)
    if path is None:
        raise DataError(
            f"{unknown_name(f'{kind} template', file.name, names(kind))} A path to a text file works too."
        )
    return parse(_read(path), file.name, kind, str(path))


def with_text(file: TemplateFile) -> TemplateFile:
    """A template with its text, which is read unless it is there."""
    if file.text is not None:
        return file
    path = find(file.name)
    if path is None:
        raise DataError(f"there is no template '{file.name}', and no such file: correct the name or the path")
    return replace(file, text=_read(path))


def find(name_or_path: str) -> Path | None:
    """The file of a template of the project, or of a path; None if there is neither."""
    candidates = (FOLDER / f"{name_or_path}.txt", Path(name_or_path))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip()
    except UnicodeDecodeError:
        raise DataError(f"{path}: a template is UTF-8 text, but this file is not") from None


def parse(text: str, name: str, kind: Kind, where: str) -> Template:
    """Parse a template's text.

    Args:
        text: of the template.
        name: as the recipe names it.
        kind: one of FIELDS.
        where: its file, for errors.
    """
    pieces = tuple(re.split(r"\{([A-Za-z_]\w*)\}", text))
    is_headed = kind == "selector" and "headed_post" in pieces[1::2]
    if is_headed:
        pieces = tuple("prompt" if piece == "headed_post" else piece for piece in pieces)
    fields = pieces[1::2]
    expected = FIELDS[kind]
    allowed = ", ".join(f"{{{field}}}" for field in expected)
    title = f"{'an' if kind == 'answer' else 'a'} {kind} template"
    for field in fields:
        if field not in expected:
            raise DataError(f"{where}: placeholder {{{field}}} is not known in {title}; there are: {allowed}")
    for field in expected:
        if fields.count(field) != 1:
            raise DataError(
                f"{where}: {title} needs the placeholder {{{field}}} exactly once, but it is there"
                f" {fields.count(field)} times (needed: {allowed})"
            )
    if kind in ("selector", "pairwise") and fields.index(expected[1]) > fields.index(expected[2]):
        raise DataError(f"{where}: {{{expected[1]}}} must come before {{{expected[2]}}}")
    if kind == "selector" and not pieces[-1].strip():
        raise DataError(
            f"{where}: a selector template must end with its answer slot, such as '### YOUR CHOICE:', after"
            " the last placeholder"
        )
    return Template(name, kind, pieces, is_headed)


_HEADING = re.compile(r"^#+[ \t]*(?:(instruction)|input)[ \t]*:[ \t]*\n?", re.IGNORECASE | re.MULTILINE)
_ANSWER_START = re.compile(r"^#+[ \t]*(?:response[ \t]*:[^{]*|[^\n{]*)\Z", re.IGNORECASE | re.MULTILINE)


def user_message(template: Template, prompt: str) -> str:
    """The message of a user with a policy template's instruction and the prompt, without the form.

    Of Alpaca's form (headings '### Instruction:', '### Input:', '### Response:') the contents
    remain and the headings are removed, with the sentence before them that explains the form. An
    answer start at the end ('### Response:', or any heading with nothing behind it) is removed too.
    Other text is unchanged, and so is the prompt, whatever it contains. A template without an
    instruction of its own gives the prompt.

    Args:
        template: of the kind 'policy'.
        prompt: of a data record.
    """
    slot = "{prompt}"  # is in a policy's template exactly once
    text = _ANSWER_START.sub("", template.render(prompt=slot))
    headings = list(_HEADING.finditer(text))
    if any(heading[1] for heading in headings) and slot not in text[: headings[0].start()]:
        text = text[headings[0].start() :]
    before, after = _HEADING.sub("", text).strip().split(slot)
    return f"{before}{prompt}{after}"
