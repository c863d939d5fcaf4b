"""Rendering of a backbone's chat template, with its arguments and its date, and the end of its turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from components.config import PolicyConfig, UserError
from components.models.backbone import EMBEDDED, TINY, load_tokenizer
from components.models.tokens import encode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # a turn of a dialogue: its role and its content
CLOCK = "strftime_now"  # the function that gives a chat template the present day, e.g. that of Llama 3.2
CLOCK_CALL = re.compile(CLOCK + r"\s*\(")
DATED_CALL = re.compile(
    CLOCK_CALL.pattern
    + r"""\s*(?:format\s*=\s*)?(?P<quote>['"])(?P<text>(?:(?!(?P=quote)).)*)(?P=quote)\s*,?\s*\)"""
)
PROBES = ("Qzvkwx", "Jhgpfy")  # answers that end in different letters, to find where a template writes them


class ChatTemplateError(UserError, ValueError):
    """A chat template that cannot be used."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer that has one."""

    tokenizer: PreTrainedTokenizerBase
    arguments: Mapping[str, Any]  # that every rendering gets, such as enable_thinking
    # Day (ISO) that a template prints in place of the present one. A template that asks for the
    # variable `date_string` gets it too.
    date: str | None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a dialogue; with `add_generation_prompt` the beginning of an answer follows.

        Raises:
            ChatTemplateError: the template rejects the turns, or asks for a day that is not set.
        """
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.dated(),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_arguments(),
            )
        except TemplateError as error:
            raise ChatTemplateError(
                f"the chat template of {self.tokenizer.name_or_path} rejects the prompt ({error})"
            ) from None
        return cast("str", text)

    def template_arguments(self) -> dict[str, Any]:
        """What the template gets besides the turns: `arguments`, and the day if one is set."""
        day = None if self.date is None else date.fromisoformat(self.date).strftime("%d %b %Y")
        return ({} if day is None else {"date_string": day}) | dict(self.arguments)

    def dated(self) -> str:
        """The template with the day in place of the calls that ask for the present one."""
        template = _default_template(self.tokenizer)
        if not CLOCK_CALL.search(template):
            return template
        name = self.tokenizer.name_or_path
        if self.date is None:
            raise ChatTemplateError(
                f"the chat template of {name} prints the present day, and no day is set: give one, e.g."
                " chat_date: 2026-01-31 (policy.chat_date, for a judge evaluation.judge.chat_date)"
            )
        day = date.fromisoformat(self.date)
        dated = DATED_CALL.sub(
            lambda call: f"{call['quote']}{day.strftime(call['text'])}{call['quote']}", template
        )
        if CLOCK_CALL.search(dated):
            raise ChatTemplateError(
                f"the chat template of {name} calls {CLOCK} with something else than a text in quotes, so"
                " that its day cannot be set: use a backbone with another chat template, or policy.chat=none"
            )
        return dated

    def end_of_turn(self) -> int | None:
        """The token that ends an answer; None if the template writes no such token.

        It is the first token after the content of an assistant's turn that a text cannot contain,
        such as <|im_end|>. What follows the content is what the texts of two dialogues with different
        answers have in common at their end, so no word of the template is taken for an answer.
        """
        question = {"role": "user", "content": "question"}
        one, other = (
            self.render([question, {"role": "assistant", "content": content}], add_generation_prompt=False)
            for content in PROBES
        )
        if one == other:
            raise ChatTemplateError(
                f"the chat template of {self.tokenizer.name_or_path} does not show the content of an"
                " assistant's turn: use another one, or policy.chat=none"
            )
        end = one[len(one) - _common_prefix(one[::-1], other[::-1]) :]
        ids: list[int] = self.tokenizer.encode(end, add_special_tokens=False)
        return next((token for token in ids if token in self._marks), None)

    @cached_property
    def _marks(self) -> set[int]:
        """The tokens that can end a turn: added ones, but those of white space that stand for indents."""
        added = {*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids}
        return {token for token in added if str(self.tokenizer.convert_ids_to_tokens(token)).strip()}

    @cached_property
    def _writes_end(self) -> bool:
        return self.end_of_turn() is not None

    def encode_answers(
        self, messages: Sequence[Message], prompt: str, prompt_ids: list[int], answers: Sequence[str]
    ) -> tuple[list[int], ...]:
        """Token ids of a prompt and of its answers, each with the end of its turn.

        They are those of the dialogue with the answer as its last turn, as in TRL's DPOTrainer: what
        the template writes before the answer's content and after the prompt, such as an empty block
        of thoughts, belongs to the answer. Where the template shows the prompt in another way if an
        answer follows, the answers begin where the tokens differ. If the template writes no token
        that ends a turn, EOS is added.

        Args:
            messages: the turns before the answer.
            prompt: the text of these turns with the beginning of the answer.
            answers: texts without white space around them.
        """
        texts = [
            self.render([*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False)
            for answer in answers
        ]
        if all(text.startswith(prompt) for text in texts):
            return prompt_ids, *(self._encode_turn(prompt, text[len(prompt) :]) for text in texts)
        dialogues = [self._encode_turn("", text) for text in texts]
        start = min(_common_prefix(prompt_ids, ids) for ids in dialogues)
        if start == 0:
            raise ChatTemplateError(
                f"the chat template of {self.tokenizer.name_or_path} begins a dialogue with an answer in"
                " another way than a prompt: use another one, or policy.chat=none"
            )
        return prompt_ids[:start], *(ids[start:] for ids in dialogues)

    def hides(self, messages: Sequence[Message], answer: str) -> bool:
        """Whether the dialogue with an answer as its last turn lacks a part of it, other than white space.

        The templates of some reasoning models write only what follows `</think>`.
        """
        text, *others = (
            self.render([*messages, {"role": "assistant", "content": content}], add_generation_prompt=False)
            for content in (answer, *PROBES)
        )
        start = min(
            _common_prefix(text, other) for other in others
        )  # the probes begin with different letters
        return "".join(answer.split()) not in "".join(text[start:].split())

    def written_tokens(self) -> set[str]:
        """The added tokens that the template writes around turns, special or not."""
        system, user, answer = (
            {"role": role, "content": PROBES[0]} for role in ("system", "user", "assistant")
        )
        ids: set[int] = set()
        for turns in ([system, user, answer, user], [user, answer, user], [user]):
            with suppress(ChatTemplateError):
                for ends in (False, True):
                    text = self.render(turns, add_generation_prompt=ends)
                    ids |= set(self.tokenizer.encode(text, add_special_tokens=False))
        added = self.tokenizer.added_tokens_decoder
        return {str(added[token]) for token in ids & self._marks if token in added}

    def rendered_turn(self) -> str:
        """What the template writes between the content of a user's turn and the answer, without white space.

        It is empty where it has no token that a text cannot contain, or rejects the turn.
        """
        try:
            text = self.render([{"role": "user", "content": PROBES[0]}], add_generation_prompt=True)
        except ChatTemplateError:
            return ""
        turn = text.rpartition(PROBES[0])[2].strip()
        return turn if any(token in turn for token in self.written_tokens()) else ""

    def _encode_turn(self, before: str, turn: str) -> list[int]:
        """Token ids of the end of a dialogue, with the end of its last turn and what follows that."""
        if self._writes_end:
            return encode_continuation(self.tokenizer, before, turn)
        ids = encode_continuation(self.tokenizer, before, turn.rstrip())
        return [*ids, cast("int", self.tokenizer.eos_token_id)]


def needs_date(config: PolicyConfig) -> bool:
    """Whether the chat template of a policy prints the present day, and no day is set in its place."""
    if config.chat_date is not None or config.chat == "none":
        return False
    if config.backbone.name in (EMBEDDED, TINY):  # their templates do not, and the models may not exist yet
        return False
    tokenizer = load_tokenizer(config.backbone)
    return bool(tokenizer.chat_template) and CLOCK_CALL.search(_default_template(tokenizer)) is not None


def _default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template for dialogues without tools."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise ChatTemplateError(
            f"the tokenizer of {tokenizer.name_or_path} has several chat templates"
            f" ({', '.join(sorted(tokenizer.chat_template or ()))}), and none of them is named 'default':"
            " name the one to use so, or set policy.chat=none"
        ) from None


def _common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of tokens or letters that two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))
