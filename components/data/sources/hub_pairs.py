"""Sources whose raw rows are a prompt with two completions, without owners.

A source is a model of its raw rows, and a method that makes a pair of one. Its base reads the rows,
drops those without a pair, draws the splits, and reserves pairs for the judge and the server.

FedPDPO's sources (D.1.1) have no owners: its appendix D.1.2 says how they are partitioned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, FiniteFloat, field_validator

from components.config import DataConfig
from components.data.conversations import ConversationRow, message_columns
from components.data.raw import BareText, Label, RawRow, Text, collect, column_names, one_of
from components.data.records import DataError, Pair, SourceData, trailing_space
from components.data.rows import CONVERSION, SUFFIXES, RawRows, find_file, from_file, from_hub
from components.data.sources.source import PairSource
from components.data.splits import hold_out, in_splits

TURN = "\n\nAssistant:"
USER_TURN = "\n\nHuman:"
CITATION = re.compile(r"[ \t]*\[\d+(?:\s*,\s*\d+)*\]")


class HubPairRow(ConversationRow):
    """A prompt with two completions."""


class HubPairs(PairSource):
    """A data set of the hub, or local files of its schema, whose rows are pairs.

    Where completions continue the text of their prompt, the white space between the two stays, at the
    beginning of the completion, so that prompt and completion together are the text of the data set.
    """

    name: ClassVar[str]  # of the source
    hub: ClassVar[str]  # id of the data set on the hub
    row: ClassVar[type[RawRow]] = HubPairRow
    splits: ClassVar[tuple[str, ...]] = ("train",)  # on the hub; its test split stays the test split
    # Revision that is read where a recipe names none, e.g. the hub's conversion to parquet of a data
    # set with a loading script, which is not run.
    conversion: ClassVar[str | None] = None
    continues: ClassVar[bool] = False  # whether completions continue the text of their prompt

    def pair(self, row: Any) -> Pair | str:
        """Make the pair of a row, or name the reason why it gives none."""
        return Pair(row.prompt, row.chosen, row.rejected)

    @property
    def folder(self) -> str | None:
        """Folder of the data set that is read; None: all of it."""
        return None

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the pairs with their splits, and reserve some of them.

        data.path names a file of the hub's schema, whose splits are drawn by prompt, or a folder
        with files train and optionally test, see `rows.find_file`.
        """
        by_split: dict[str, list[Pair]] = {}
        dropped: Counter[str] = Counter()
        warnings: list[str] = []
        splits = self.raw_splits(data)
        if self.reads_messages:
            splits, warnings = self._with_lists(splits, data)
        for split, (rows, where) in splits.items():
            by_split[split], counts = self.make_pairs(rows, where)
            dropped += counts
        pairs, dropped["prompt also in the test split"] = in_splits(by_split, data, seed)
        held = hold_out(pairs, self.name, self.shares, seed, +dropped)
        return replace(held, warnings=tuple(warnings))

    def _with_lists(
        self, splits: Mapping[str, RawRows], data: DataConfig
    ) -> tuple[dict[str, RawRows], list[str]]:
        """The rows with lists in place of messages as JSON text, and sentences on what was read so."""
        raw = {split: RawRows(list(rows), where) for split, (rows, where) in splits.items()}
        everything = [row for rows, _ in raw.values() for row in rows]
        messages = message_columns(everything, self.name, data.messages)
        lists: dict[str, RawRows] = {}
        for split, (rows, where) in raw.items():
            read = [messages.lists(row, f"{where}, row {number}") for number, row in enumerate(rows, 1)]
            lists[split] = RawRows(cast("list[dict[str, Any]]", read), where)
        read_rows = [row for rows, _ in lists.values() for row in rows]
        return lists, messages.warnings(list(zip(everything, read_rows, strict=True)))

    def make_pairs(self, rows: Iterable[Mapping[str, Any]], where: str) -> tuple[list[Pair], Counter[str]]:
        """Make pairs of raw rows, without white space around their texts.

        Returns:
            the pairs, and the number of rows without one, by reason: those of the source, an empty
            text, or two completions that are the same.
        """
        pairs, dropped = collect(self.row.read(rows, where), self._bare_pair)
        if not pairs:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in dropped.items()) or "there are none"
            raise DataError(
                f"{where}: none of the {dropped.total()} rows makes a pair ({reasons}); see whether its"
                " columns hold what this source reads"
            )
        return pairs, dropped

    def raw_splits(self, data: DataConfig) -> dict[str, RawRows]:
        """The raw rows of the hub or of data.path, by split."""
        if data.path is None:
            revision = data.revision or self.conversion
            return {
                split: from_hub(self.hub, split=split, revision=revision, data_dir=self.folder)
                for split in self.splits
            }
        path = Path(data.path)
        found = {split: find_file(path, split) for split in ("train", "test")}
        files = {split: file for split, file in found.items() if file is not None} or {"train": path}
        if "train" not in files:
            raise DataError(
                f"{path}: expected a file train ({', '.join(SUFFIXES)}), and optionally test, in this folder"
            )
        return {split: from_file(file) for split, file in files.items()}

    def _bare_pair(self, row: RawRow) -> Pair | str:
        pair = self.pair(row)
        if isinstance(pair, str):
            return pair
        prompt, chosen, rejected = pair.prompt.strip(), pair.chosen.strip(), pair.rejected.strip()
        if not (prompt and chosen and rejected):
            return "empty text"
        if chosen == rejected:
            return "both answers the same"
        if self.continues:
            between = trailing_space(pair.prompt)
            chosen, rejected = ((between + text).rstrip() for text in (pair.chosen, pair.rejected))
        return replace(pair, prompt=prompt, chosen=chosen, rejected=rejected)


class PyDpo(HubPairs):
    """Validated Python programs against those of weaker models (FedPDPO D.1.1).

    It has one split of 9.47 thousand rows; FedPDPO's 8,966 and 500 are a data.test of 0.053.
    """

    reads_messages: ClassVar[bool] = True

    name = "py-dpo"
    hub = "jondurbin/py-dpo-v0.1"


class ImdbRow(HubPairRow):
    """Two completions, which begin with their prompt, and their rewards."""

    chosen_reward: FiniteFloat
    rejected_reward: FiniteFloat


class Imdb(HubPairs):
    """Beginnings of film reviews, each with two continuations (FedPDPO D.1.1).

    The prompt is removed from both completions; the white space after it stays: a review is read as
    one text. The margin is the difference of the rewards; use data.partition margin (D.1.2) or iid.
    The hub's two splits have 9,000 and 1,000 rows. Beginnings are short, so the same one may be in
    both: those training rows are dropped and counted. Their number was not measured.
    """

    reads_messages: ClassVar[bool] = True

    name = "imdb"
    hub = "yuasosnin/imdb-dpo"
    row = ImdbRow
    splits = ("train", "test")
    continues = True

    def pair(self, row: ImdbRow) -> Pair | str:
        if not (row.chosen.startswith(row.prompt) and row.rejected.startswith(row.prompt)):
            return "completion that does not begin with its prompt"
        margin = row.chosen_reward - row.rejected_reward
        if not margin > 0:
            return "margin not above 0"
        chosen, rejected = (text.removeprefix(row.prompt) for text in (row.chosen, row.rejected))
        return Pair(row.prompt, chosen, rejected, margin=margin)


class CodeRow(RawRow):
    """A programming task with secure and vulnerable code."""

    lang: Label
    vulnerability: Text
    system: BareText
    question: BareText
    chosen: Text
    rejected: Text


class CodeVulnerability(HubPairs):
    """Secure against vulnerable code, in 11 languages (FedPDPO D.1.1).

    The prompt is the question, after the row's system text. The domain is the language as the data
    set writes it: use data.partition column over domain, with the languages of each client in
    data.column_clients (D.1.2), or dirichlet. It has one split of 4.7 thousand rows; FedPDPO's 4,194
    and 466 are a data.test of 0.1; the paper does not say which rows those are.
    """

    name = "code-vulnerability"
    hub = "CyberNative/Code_Vulnerability_Security_DPO"
    row = CodeRow

    def pair(self, row: CodeRow) -> Pair | str:
        if not row.question:
            return "empty text"
        return Pair(f"{row.system}\n\n{row.question}", row.chosen, row.rejected, domain=row.lang.strip())


class WebGptRow(RawRow):
    """A question (text, or an object with full_text), and two answers with their scores."""

    question: Text
    answer_0: Text
    answer_1: Text
    score_0: FiniteFloat
    score_1: FiniteFloat

    @field_validator("question", mode="before")
    @classmethod
    def _full_text(cls, question: Any) -> Any:
        if not isinstance(question, Mapping):
            return question
        if "full_text" not in question:
            raise ValueError(f"must be text, or an object with full_text, but has: {column_names(question)}")
        return question["full_text"]


class WebGpt(HubPairs):
    """Two long answers to a question with scores by people (Nakano et al., 2021; FedPDPO D.1.1).

    The answer with the higher score is chosen, and the margin is the difference; rows with equal
    scores are ties and are dropped. Use data.partition iid or margin, or the source mixture. It has
    one split of 19.6 thousand rows, of which FedPDPO takes 12,000 and 1,434, without saying which: the
    source mixture takes as many (max_pairs).
    """

    name = "webgpt"
    hub = "openai/webgpt_comparisons"
    not_judgements: ClassVar[str] = ""
    row = WebGptRow
    conversion = CONVERSION

    references: Literal["keep", "remove"] = Field(
        "keep",
        description=(
            "What happens to marks in answers that cite a quote, such as [1] or [1, 2]; a list of numbers"
            " in brackets is always read as one."
        ),
    )

    def pair(self, row: WebGptRow) -> Pair | str:
        margin = row.score_0 - row.score_1
        if not margin:
            return "tie"
        answers = [row.answer_0, row.answer_1]
        if self.references == "remove":
            answers = [CITATION.sub("", answer) for answer in answers]
        chosen, rejected = answers if margin > 0 else answers[::-1]
        return Pair(row.question, chosen, rejected, margin=abs(margin))


class UltraFeedback(HubPairs):
    """Answers to instructions of many kinds (Cui et al., 2023; FedPDPO D.1.1).

    The exact schema was not verified on the hub, so both forms of completions are read; of messages,
    the answer must follow the prompt alone. Use data.partition iid, or the source mixture. Its test
    split of 895 rows stays the test split; FedPDPO tests on as many pairs. Of the 17.1 thousand
    training rows FedPDPO takes 12,000, without saying which.
    """

    reads_messages: ClassVar[bool] = True

    name = "ultrafeedback"
    hub = "kaitchup/UltraFeedback-prompt-chosen-rejected"
    splits = ("train", "test")


class DialogueRow(RawRow):
    """Two whole dialogues, which differ in the assistant's last turn."""

    chosen: Text
    rejected: Text


class HhRlhf(HubPairs):
    """Anthropic's helpful and harmless dialogues (Bai et al., 2022; MIT).

    The prompt is the dialogue up to the assistant's last turn. Use data.partition iid or dirichlet.
    """

    name = "hh-rlhf"
    hub = "Anthropic/hh-rlhf"
    not_judgements: ClassVar[str] = ""
    row = DialogueRow
    splits = ("train", "test")

    subset: str = Field(
        "harmless-base",
        min_length=1,
        description=(
            "Folder of the hub data set: harmless-base, helpful-base, helpful-online,"
            " helpful-rejection-sampled."
        ),
    )

    @property
    def folder(self) -> str:
        return self.subset

    def pair(self, row: DialogueRow) -> Pair | str:
        prompt, turn, chosen = row.chosen.rpartition(TURN)
        other_prompt, other_turn, rejected = row.rejected.rpartition(TURN)
        if not (turn and other_turn and prompt.strip()) or prompt != other_prompt:
            return "dialogues without a common prompt"
        if not (chosen.strip() and rejected.strip()):
            return "empty answer"
        if USER_TURN in chosen or USER_TURN in rejected:
            return "dialogue that the user ends"  # the assistant's answer differs in an earlier turn
        return Pair(prompt, chosen, rejected, domain=self.subset)


TIE = 2


class LabeledRow(RawRow):
    """A prompt with two responses and a human verdict."""

    scenario: Label
    label: Annotated[int, one_of({0: "response 1 is better", 1: "response 2 is better", TIE: "tie"})]
    prompt: Text
    first: BareText = Field(alias="response 1")
    second: BareText = Field(alias="response 2")


class AutoJPairs(HubPairs):
    """Options of the source auto-j.

    It has 58 scenarios with human verdicts (Li et al., 2023, arXiv 2310.05470), and no owners: use
    data.partition dirichlet (by scenario) or iid. It is the file testdata_pairwise.jsonl of the repository
    GAIR-NLP/auto-j, or a part of it; data.path names it.
    """

    is_local: ClassVar[bool] = True

    name = "auto-j"
    not_judgements: ClassVar[str] = ""
    row = LabeledRow

    def raw_splits(self, data: DataConfig) -> dict[str, RawRows]:
        """The rows of the file, whose splits are drawn by prompt."""
        if data.path is None:
            raise DataError(
                "the data source auto-j reads Auto-J's pairwise set from a file: give testdata_pairwise.jsonl"
                " of the repository GAIR-NLP/auto-j as data.path"
            )
        return {"train": from_file(Path(data.path))}

    def pair(self, row: LabeledRow) -> Pair | str:
        """The preferred response and the other one, with the scenario as domain."""
        if row.label == TIE:
            return "tie"
        if not (row.prompt.strip() and row.first and row.second):
            return "empty prompt or response"
        if row.first == row.second:
            return "both responses the same"
        chosen, rejected = (row.second, row.first) if row.label else (row.first, row.second)
        return Pair(row.prompt, chosen, rejected, domain=row.scenario)
