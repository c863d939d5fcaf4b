"""Source `chitchat`: human conversations (embedded, PyPI package chitchat-dataset, MIT): 7,168 conversations, 1,315 people.

A client is a participant. The prompt is the conversation so far, chosen the reply that this person gave to it, and
rejected a reply of the same person in another conversation. The domain is the opening question that both were shown.

Each reply is chosen once and rejected once, within one split: so no text is liked or disliked for itself, and no
held-out answer is met in training.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from components.config import DataConfig, Section
from components.data.records import DataError, SourceData
from components.data.registry import pairs_dataset, prompts_dataset, source
from components.data.splits import assign, normal
from components.seeding import generator

Reply = dict[str, Any]


class ChitchatOptions(Section):
    """Options of the source chitchat."""

    turns: int = Field(4, ge=1, description="Last turns of the conversation that the prompt shows.")
    min_reply_words: int = Field(4, ge=1, description="Replies with fewer words are no answer to judge by.")
    max_reply_words: int = Field(150, ge=1, description="Nor are monologues with more words; the longest in the data has 6,414.")
    replies_per_conversation: int = Field(4, ge=1, description="Replies of one person used from one conversation (a seeded choice).")
    min_pairs: int = Field(20, ge=1, description="A participant with fewer pairs is no client.")
    judge_participants: int = Field(20, ge=0, description="Participants, drawn from those with enough pairs, whose pairs train the judge.")
    align_prompts: int = Field(200, ge=0, description="Server prompts, at most one a conversation, of people who are neither clients nor judges.")
    evaluation_prompts: int = Field(100, ge=1, description="Held-out prompts, of the same people.")


@source("chitchat", ChitchatOptions)
def load(data: DataConfig, options: ChitchatOptions, seed: int) -> SourceData:
    """Participants' pairs, other people's prompts and the judge's pairs.

    With the natural partition data.clients keeps that many participants, those with most pairs; else all are kept.

    Raises:
        DataError: the package is missing, or too few participants have enough pairs.
    """
    replies = read_replies(options.turns, options.min_reply_words, options.max_reply_words)
    conversations = sorted({r["group"] for r in replies})
    split = dict(zip(conversations, assign(conversations, data.validation, data.test, seed), strict=True))
    by_person: dict[str, list[Reply]] = defaultdict(list)
    for reply in replies:
        by_person[reply["client_id"]].append(reply)
    pairs = {person: _pairs(person, by_person[person], split, options.replies_per_conversation, seed) for person in sorted(by_person)}
    eligible = [p for p in pairs if len(pairs[p]) >= options.min_pairs]
    drawn = generator(seed, "judges").permutation(len(eligible))[:options.judge_participants]
    judges = {eligible[i] for i in drawn}
    wanted_clients = data.clients if data.partition == "natural" else None
    clients = sorted((p for p in eligible if p not in judges), key=lambda p: (-len(pairs[p]), p))[:wanted_clients]
    if len(judges) < options.judge_participants or len(clients) < (wanted_clients or 1):
        raise DataError(f"chitchat has {len(eligible)} participants with at least {options.min_pairs} pairs, too few for "
                        f"{wanted_clients or 1} clients and {options.judge_participants} judges: lower data.clients, judge_participants or min_pairs")

    busy = {r["group"] for p in (*judges, *clients) for r in by_person[p]}
    free: dict[str, list[Reply]] = defaultdict(list)
    for reply in replies:
        if reply["group"] not in busy:
            free[reply["group"]].append(reply)
    order = sorted(free)
    order = [order[i] for i in generator(seed, "chitchat", "prompts").permutation(len(order))]
    drawn_replies = (free[g][generator(seed, "chitchat", "prompt", g).integers(len(free[g]))] for g in order)
    asked = [reply for reply in drawn_replies if not reply["again"]]
    wanted = options.align_prompts + options.evaluation_prompts
    if len(asked) < wanted:
        raise DataError(f"chitchat has {len(asked)} conversations of people who are neither clients nor judges, but data.options asks for "
                        f"{wanted} prompts: lower align_prompts or evaluation_prompts")
    prompts = [(r["prompt"], [r["chosen"]], "test" if i < options.evaluation_prompts else "align") for i, r in enumerate(asked[:wanted])]
    return SourceData(
        pairs_dataset((row for p in clients for row in pairs[p]), "chitchat"), prompts_dataset(prompts, "chitchat"),
        pairs_dataset((row for p in sorted(judges) for row in pairs[p]), "chitchat"))


def read_replies(turns: int, min_words: int, max_words: int) -> list[Reply]:
    """All replies with what they answer: prompt, chosen, client_id, domain, group (the conversation) and again.

    Messages that a person sent in a row are one turn. A prompt that came up before is left out, so that a prompt
    belongs to one conversation. Where it came up in another case (again: true), the reply is left out when it is drawn.

    Raises:
        DataError: the package chitchat-dataset is not installed.
    """
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise DataError("the data source chitchat needs the package chitchat-dataset: pip install 'fed-rlhf[demo]', or make install")
    raw = json.loads((Path(spec.origin).parent / "dataset.json").read_text(encoding="utf-8"))
    replies, seen, said_before = [], set(), set()
    for conversation in sorted(raw):
        question = " ".join((raw[conversation].get("prompt") or "").split())
        said: list[tuple[str, str]] = []
        for turn in raw[conversation]["messages"]:
            text = " ".join(" ".join(m["text"] for m in turn).split())
            if text and said and said[-1][0] == turn[0]["sender"]:
                said[-1] = (said[-1][0], f"{said[-1][1]} {text}")
            elif text:
                said.append((turn[0]["sender"], text))
        for i in range(1, len(said)):
            person, reply = said[i]
            lines = [f"{'YOU' if who == person else 'THEY'}: {text}" for who, text in said[max(0, i - turns):i]]
            prompt = "\n".join(([f"TOPIC: {question}"] if question else []) + lines)
            if min_words <= len(reply.split()) <= max_words and prompt not in seen:
                seen.add(prompt)
                replies.append({"prompt": prompt, "chosen": reply, "client_id": person, "domain": question or "no question", "group": conversation, "again": normal(prompt) in said_before})
                said_before.add(normal(prompt))
    return replies


def _pairs(person: str, replies: Sequence[Reply], split: dict[str, str], most: int, seed: int) -> list[dict[str, Any]]:
    """Chosen and rejected replies of one person: a rotation of the replies, conversation by conversation."""
    pairs = []
    by_split: dict[str, dict[str, list[Reply]]] = defaultdict(lambda: defaultdict(list))
    for reply in replies:
        by_split[split[reply["group"]]][reply["group"]].append(reply)
    for name, talks in sorted(by_split.items()):
        draw = generator(seed, "chitchat", "pairs", person, name)
        blocks = []
        for talk in (sorted(talks)[i] for i in draw.permutation(len(talks))):
            kept = sorted(draw.permutation(len(talks[talk]))[:most])
            blocks.append([talks[talk][i] for i in kept if not talks[talk][i]["again"]])
        while blocks and 2 * max(map(len, blocks)) > sum(map(len, blocks)):
            max(blocks, key=len).pop()      # a rotation by the longest talk must lead out of every talk
        row = [reply for block in blocks for reply in block]
        shift = max(map(len, blocks), default=0)
        for i, reply in enumerate(row):
            other = row[(i + shift) % len(row)]["chosen"]
            if other != reply["chosen"]:
                pairs.append(reply | {"rejected": other, "split": name})
    return pairs
