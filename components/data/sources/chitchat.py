"""Source `chitchat`: human conversations (embedded, PyPI package chitchat-dataset, MIT).

The package has 7,168 conversations of 1,315 people. A client is a participant. The prompt is the
conversation so far, chosen the reply of this person, and rejected a reply of the same person in
another conversation. The domain is the opening question that both participants were shown.

Each reply is chosen once and rejected once, within one split: so no text is preferred or rejected
for itself, and no held-out reply is seen in training.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from components.config import DataConfig
from components.data.records import DataError, Pair, Prompt, SourceData
from components.data.same_text import same_text
from components.data.sources.source import Source
from components.data.splits import assign_splits
from components.seeding import generator


@dataclass(frozen=True)
class ChitchatReply:
    """A reply in a conversation."""

    prompt: str  # the last turns before it
    text: str
    person: str  # its author
    question: str  # opening question of the conversation
    conversation: str  # id
    repeated_prompt: bool  # whether the prompt came up before in other case; if drawn, it is not used


class Chitchat(Source):
    """Options of the source chitchat."""

    is_local: ClassVar[bool] = True
    not_judgements: ClassVar[str] = "shows the verdict in the texts, since a chosen reply is the person's own"

    turns: int = Field(4, ge=1, description="Last turns of the conversation that the prompt shows.")
    min_reply_words: int = Field(4, ge=1, description="Minimum length of a reply (words).")
    max_reply_words: int = Field(
        150, ge=1, description="Maximum length of a reply (words); the longest in the data has 6,414."
    )
    replies_per_conversation: int = Field(
        4, ge=1, description="Replies of one person used from one conversation (a seeded choice)."
    )
    min_pairs: int = Field(20, ge=1, description="A participant with fewer pairs is no client.")
    judge_participants: int = Field(
        20, ge=0, description="Participants, drawn from those with enough pairs, whose pairs train the judge."
    )
    align_prompts: int = Field(
        200,
        ge=0,
        description=(
            "Server prompts, at most one per conversation, of people who are neither clients nor judges."
        ),
    )
    evaluation_prompts: int = Field(100, ge=1, description="Held-out prompts, of the same people.")

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Load the participants' pairs, the judge's pairs and other people's prompts.

        With the natural partition data.clients is the number of participants, those with most
        pairs; otherwise all participate.
        """
        replies = read_replies(self.turns, self.min_reply_words, self.max_reply_words)
        pairs = self._pairs_by_person(replies, data, seed)
        clients, judges = self._choose_people(pairs, data, seed)
        prompts = self._choose_prompts(replies, {*clients, *judges}, seed)
        of_clients, of_judges = (
            list(chain.from_iterable(pairs[person] for person in people)) for people in (clients, judges)
        )
        return SourceData(of_clients, prompts, of_judges)

    def _pairs_by_person(
        self, replies: Sequence[ChitchatReply], data: DataConfig, seed: int
    ) -> dict[str, list[Pair]]:
        conversations = sorted({reply.conversation for reply in replies})
        splits = assign_splits(conversations, data.validation, data.test, seed)
        split = dict(zip(conversations, splits, strict=True))
        by_person: dict[str, list[ChitchatReply]] = defaultdict(list)
        for reply in replies:
            by_person[reply.person].append(reply)
        return {
            person: person_pairs(by_person[person], split, self.replies_per_conversation, seed)
            for person in sorted(by_person)
        }

    def _choose_people(
        self, pairs: Mapping[str, Sequence[Pair]], data: DataConfig, seed: int
    ) -> tuple[list[str], list[str]]:
        """The clients, and the judge's people."""
        eligible = [person for person in pairs if len(pairs[person]) >= self.min_pairs]
        drawn = generator(seed, "judges").permutation(len(eligible))[: self.judge_participants]
        judges = {eligible[i] for i in drawn}
        count = data.clients if data.partition == "natural" else None
        others = [person for person in eligible if person not in judges]
        clients = sorted(others, key=lambda person: (-len(pairs[person]), person))[:count]
        if len(judges) < self.judge_participants or len(clients) < (count or 1):
            raise DataError(
                f"chitchat has {len(eligible)} participants with at least {self.min_pairs} pairs, too few for"
                f" {count or 1} clients and {self.judge_participants} judges: lower data.clients,"
                " judge_participants or min_pairs"
            )
        return clients, sorted(judges)

    def _choose_prompts(
        self, replies: Sequence[ChitchatReply], busy: Collection[str], seed: int
    ) -> list[Prompt]:
        """Draw prompts of conversations in which nobody is a client or a judge."""
        busy_conversations = {reply.conversation for reply in replies if reply.person in busy}
        free: dict[str, list[ChitchatReply]] = defaultdict(list)
        for reply in replies:
            if reply.conversation not in busy_conversations:
                free[reply.conversation].append(reply)
        names = sorted(free)
        order = generator(seed, "chitchat", "prompts").permutation(len(names))
        usable: list[ChitchatReply] = []
        for name in (names[i] for i in order):
            draw = generator(seed, "chitchat", "prompt", name)
            reply = free[name][int(draw.integers(len(free[name])))]
            if not reply.repeated_prompt:
                usable.append(reply)
        count = self.align_prompts + self.evaluation_prompts
        if len(usable) < count:
            raise DataError(
                f"chitchat has {len(usable)} conversations of people who are neither clients nor judges, but"
                f" data.options asks for {count} prompts: lower align_prompts or evaluation_prompts"
            )
        return [
            Prompt(reply.prompt, [reply.text], "test" if i < self.evaluation_prompts else "align")
            for i, reply in enumerate(usable[:count])
        ]


def read_replies(turns: int, min_words: int, max_words: int) -> list[ChitchatReply]:
    """Read all replies with the turns before them.

    Consecutive messages of a person are one turn. A reply whose prompt came up before is left out,
    so that a prompt belongs to one conversation; if it came up in other case, the reply is marked.

    Args:
        turns: turns that a prompt shows.
        min_words, max_words: length of a reply.
    """
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise DataError(
            "the data source chitchat needs the package chitchat-dataset: make install, or pip install -e"
            " '.[demo]' in a checkout"
        )
    raw = json.loads((Path(spec.origin).parent / "dataset.json").read_text(encoding="utf-8"))
    replies: list[ChitchatReply] = []
    prompts: set[str] = set()
    keys: set[str] = set()
    for conversation in sorted(raw):
        question = " ".join((raw[conversation].get("prompt") or "").split())
        spoken = _spoken(raw[conversation]["messages"])
        for i in range(1, len(spoken)):
            person, text = spoken[i]
            lines = [f"TOPIC: {question}"] if question else []
            lines += [
                f"{'YOU' if who == person else 'THEY'}: {said}" for who, said in spoken[max(0, i - turns) : i]
            ]
            prompt = "\n".join(lines)
            if not min_words <= len(text.split()) <= max_words or prompt in prompts:
                continue
            key = same_text(prompt)
            replies.append(
                ChitchatReply(prompt, text, person, question or "no question", conversation, key in keys)
            )
            prompts.add(prompt)
            keys.add(key)
    return replies


def _spoken(messages: Iterable[Sequence[Mapping[str, Any]]]) -> list[tuple[str, str]]:
    """The turns of a conversation: (person, text)."""
    spoken: list[tuple[str, str]] = []
    for turn in messages:
        text = " ".join(" ".join(message["text"] for message in turn).split())
        person = turn[0]["sender"] if turn else ""
        if text and spoken and spoken[-1][0] == person:
            spoken[-1] = (person, f"{spoken[-1][1]} {text}")
        elif text:
            spoken.append((person, text))
    return spoken


def person_pairs(
    replies: Sequence[ChitchatReply], split: Mapping[str, str], per_conversation: int, seed: int
) -> list[Pair]:
    """Pair the replies of one person: each is rejected once, in a rotation over the conversations.

    Args:
        replies: of one person.
        split: by conversation.
        per_conversation: maximum number of replies of one conversation.
        seed: of the recipe.
    """
    pairs: list[Pair] = []
    by_split: dict[str, dict[str, list[ChitchatReply]]] = defaultdict(lambda: defaultdict(list))
    for reply in replies:
        by_split[split[reply.conversation]][reply.conversation].append(reply)
    for name, conversations in sorted(by_split.items()):
        draw = generator(seed, "chitchat", "pairs", replies[0].person, name)
        rotation, shift = _rotation(conversations, per_conversation, draw)
        for i, reply in enumerate(rotation):
            other = rotation[(i + shift) % len(rotation)].text
            if other != reply.text:
                pairs.append(
                    Pair(
                        reply.prompt,
                        reply.text,
                        other,
                        client_id=reply.person,
                        domain=reply.question,
                        split=name,
                        group=reply.conversation,
                    )
                )
    return pairs


def _rotation(
    conversations: Mapping[str, Sequence[ChitchatReply]], per_conversation: int, draw: np.random.Generator
) -> tuple[list[ChitchatReply], int]:
    """Replies of one person by conversation, and a shift that leads out of each conversation."""
    blocks: list[list[ChitchatReply]] = []
    names = sorted(conversations)
    for i in draw.permutation(len(names)):
        replies = conversations[names[i]]
        chosen = sorted(draw.permutation(len(replies))[:per_conversation])
        blocks.append([replies[k] for k in chosen if not replies[k].repeated_prompt])
    while blocks and 2 * max(map(len, blocks)) > sum(map(len, blocks)):
        max(blocks, key=len).pop()
    rotation: list[ChitchatReply] = []
    for block in blocks:
        rotation += block
    return rotation, max(map(len, blocks), default=0)
