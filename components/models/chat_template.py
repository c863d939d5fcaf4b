"""Rendering of a backbone's chat template, with its arguments and its date, and the end of its turns."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache, partial
from itertools import chain, permutations
from typing import TYPE_CHECKING, Any, cast

from components.config import PolicyConfig, UserError
from components.models.backbone import EMBEDDED, TINY, load_tokenizer
from components.models.tokens import CUT, Marks, TextMarks, encode_continuation, surrounding_ids

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
    # What is no token within contents, see `find_marks`; None: contents are rendered as they are.
    marks: TextMarks | None = None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a dialogue; with `add_generation_prompt` the beginning of an answer follows.

        Control tokens within contents are cut (tokens.CUT), so that `encode_text` encodes them as text.

        Raises:
            ChatTemplateError: the template rejects the turns, or asks for a day that is not set.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [self._as_text(message) for message in messages],
                chat_template=self.dated(),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_arguments(),
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may raise anything, such as TypeError
            raise ChatTemplateError(
                f"the chat template of {self.tokenizer.name_or_path} rejects the prompt ({error})"
            ) from None
        return cast("str", text)

    def _as_text(self, message: Message) -> Message:
        if self.marks is None:
            return message
        marks = self.marks.answer if message["role"] == "assistant" else self.marks.prompt
        return {**message, "content": marks.cut(message["content"])}

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

    def hides(self, messages: Sequence[Message], *answers: str) -> bool:
        """Whether the dialogue with an answer as its last turn lacks a part of it, other than white space.

        The templates of some reasoning models write only what follows `</think>`.
        """
        before = self.render(messages, add_generation_prompt=False)
        return any(self._hides(messages, before, answer) for answer in answers)

    def _hides(self, messages: Sequence[Message], before: str, answer: str) -> bool:
        """Whether a part of an answer is not written after the turns before it, whose text is given."""
        turns = [*messages, {"role": "assistant", "content": answer}]
        text = self.render(turns, add_generation_prompt=False)
        return _bare(answer) not in _bare(text[_common_prefix(before, text) :])

    def hiding_texts(self, messages: Sequence[Message]) -> tuple[tuple[str, ...], ...] | None:
        """Groups of texts, of which an answer that may not be written in full has one; None: any may be so.

        A template looks for texts that its source names, such as '</think>'. Those count that hide a part of
        an answer that holds them, alone or with another one, where everything else is written as it is:
        letters, marks, line ends, however many there are. The messages are the turns before the answer.
        """
        from jinja2 import Environment

        before = self.render(messages, add_generation_prompt=False)
        hides = partial(self._hides, messages, before)
        first, last = PROBES
        if hides(f"{first} {string.punctuation}\n\n{string.ascii_letters} \u00e9\u4e2d\n" * 50 + last):
            return None
        tokens = Environment().lexer.tokenize(self.dated())
        named = sorted({str(token.value) for token in tokens if token.type == "string"})
        named = [text for text in named if text.strip()]
        alone = [text for text in named if hides(f"{first}{text}{last}")]
        others = [text for text in named if text not in alone]
        together = [
            pair for pair in permutations(others, 2) if hides(f"{first}{pair[0]}{last}{pair[1]}{first}")
        ]
        return (*((text,) for text in alone), *together)

    @cached_property
    def omitted_roles(self) -> list[str]:
        """Roles of which the template leaves turns out, in a dialogue of seven turns after one of the system.

        'system' is not among them where the template rejects such a turn, which rendering says.
        """
        roles = ["system", *["user", "assistant"] * 3, "user"]
        for dialogue in (roles, roles[1:]):
            contents = [f"{PROBES[0]}{number}{PROBES[1]}" for number in range(len(dialogue))]
            turns = [{"role": role, "content": text} for role, text in zip(dialogue, contents, strict=True)]
            with suppress(ChatTemplateError):
                text = self.render(turns, add_generation_prompt=True)
                omitted = [
                    role for role, content in zip(dialogue, contents, strict=True) if content not in text
                ]
                return sorted(set(omitted))
        return []

    def trains_prompt(self, messages: Sequence[Message], answer: str = PROBES[0]) -> bool:
        """Whether the text that an answer is sampled after begins the dialogue that ends with the answer."""
        prompt = self.render(messages, add_generation_prompt=True)
        answered = [*messages, {"role": "assistant", "content": answer}]
        return self.render(answered, add_generation_prompt=False).startswith(prompt)

    def written_ids(self, roles: Sequence[str], add_generation_prompt: bool) -> list[list[int]]:
        """The ids of what the template writes before, between and after the contents of a dialogue.

        The dialogue has turns of these roles, the first of which is the system's; it goes without that, or
        has the user's alone, where the template rejects others.
        """
        for dialogue in (roles, roles[1:], roles[1:2]):
            turns = [{"role": role, "content": PROBES[0]} for role in dialogue]
            with suppress(ChatTemplateError):
                text = self.render(turns, add_generation_prompt)
                return [
                    self.tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(PROBES[0])
                ]
        return []

    def rendered_turn(self) -> str:
        """What the template writes between the content of a user's turn and the answer, without white space.

        It is empty where it has no token but EOS that a text cannot contain, or rejects the turn.
        """
        try:
            text = self.render([{"role": "user", "content": PROBES[0]}], add_generation_prompt=True)
        except ChatTemplateError:
            return ""
        turn = text.rpartition(PROBES[0])[2].strip()
        marks = self._marks & set(self.tokenizer.encode(turn, add_special_tokens=False))
        return turn if marks - {self.tokenizer.eos_token_id} else ""

    def _encode_turn(self, before: str, turn: str) -> list[int]:
        """Token ids of the end of a dialogue, with the end of its last turn and what follows that."""
        if self._writes_end:
            return encode_continuation(self.tokenizer, before, turn)
        ids = encode_continuation(self.tokenizer, before, turn.rstrip())
        return [*ids, cast("int", self.tokenizer.eos_token_id)]


def find_marks(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any] | None = None,
    stop_ids: Collection[int] = (),
) -> TextMarks:
    """The tokens that owners' texts are read without: those that a sequence is built of.

    They are those that the chat template writes around the contents of turns, those with which the
    tokenizer begins and ends a text, EOS, `stop_ids`, and the unknown token of a tokenizer to which no text
    is unknown (that of SmolLM is the end of a document). A template may write thoughts before an answer,
    see `_thoughts`, whose tokens an answer may hold, as well as what it writes only before the last answer.

    Args:
        arguments: of the chat template, see ChatTemplate.
        stop_ids: that end a completion, as of `find_stop_ids`.
    """
    ends = {*stop_ids, *chain(*surrounding_ids(tokenizer))}
    roles = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ == "BPE" and model.unk_token is None:
        roles.append(tokenizer.unk_token_id)
    ends |= {token for token in roles if token is not None}
    pieces: list[list[int]] = []
    before_answer: list[list[int]] = []
    if tokenizer.chat_template:
        chat = ChatTemplate(tokenizer, arguments or {}, date.min.isoformat())
        with suppress(ChatTemplateError):  # the template cannot be used, as its first use says
            dialogue = ("system", "user", "assistant", "user")
            pieces = chat.written_ids(dialogue, add_generation_prompt=False)
            before_answer = chat.written_ids(dialogue, add_generation_prompt=True)
            before_answer += chat.written_ids(dialogue[:-1], add_generation_prompt=False)
    names = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
    thoughts = _thoughts(pieces, names)
    turns = {*chain(*pieces)} - (thoughts - ends)
    return TextMarks(
        prompt=Marks(tokenizer, ends.union(thoughts, *pieces, *before_answer)),
        answer=Marks(tokenizer, ends | turns),
    )


def _thoughts(pieces: Sequence[Sequence[int]], names: Mapping[int, str]) -> set[int]:
    """Of added tokens in what a template writes, those that begin and end thoughts: `<x>` and `</x>`.

    Both are in one piece, in this order, or the template writes one of them alone. Those of turns, such as
    [INST] and [/INST], are in two pieces.
    """
    written = set(chain(*pieces))
    thoughts: set[int] = set()
    for token in written & names.keys():
        twins = {other for other in names if names[other].replace("/", "") == names[token].replace("/", "")}
        twins -= {token}
        follow = any(
            other in twins and token in piece[:place] and "/" in names[other]
            for piece in pieces
            for place, other in enumerate(piece)
        )
        if follow or (twins and not twins & written):
            thoughts |= {token, *twins}
    return thoughts


@lru_cache(maxsize=8)
def marks_of(tokenizer: PreTrainedTokenizerBase) -> TextMarks:
    """The tokens that texts are read without by a model that is no policy, see `find_marks`."""
    return find_marks(tokenizer)


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


def _bare(text: str) -> str:
    """A text without white space and without CUT."""
    return "".join(text.replace(CUT, "").split())


def _common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of tokens or letters that two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))
