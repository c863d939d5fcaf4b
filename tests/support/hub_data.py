"""Pairs and prompts as folders with the files, columns and types that their data sets have on the hub.

A folder has the data set's id as its relative path, so that `datasets` reads it in place of the hub.
The layouts are those of the data sets' public cards, file lists and conversion commits:

    openai/summarize_from_feedback, openai/webgpt_comparisons, ybisk/piqa: main is a loading script;
        the branch refs/convert/parquet has <configuration>/<split>/0000.parquet and no README
    stanfordnlp/SHP, Anthropic/hh-rlhf: folders of JSON lines at the root
    the others: data/<split>-*.parquet, or one file at the root, or configurations that the card names

Where a type is not documented, it is the narrowest that holds the values.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

STRING = pa.string()
TEXTS = pa.list_(STRING)
QUOTES = pa.struct({"title": TEXTS, "extract": TEXTS})
TOKENS = pa.struct({"prefix": pa.list_(pa.int32()), "completion": pa.list_(pa.int32())})
WEBGPT = {
    "question": pa.struct({"dataset": STRING, "id": STRING, "full_text": STRING}),
    "quotes_0": QUOTES,
    "answer_0": STRING,
    "tokens_0": TOKENS,
    "score_0": pa.float32(),
    "quotes_1": QUOTES,
    "answer_1": STRING,
    "tokens_1": TOKENS,
    "score_1": pa.float32(),
}
COMPARISONS = {
    "info": pa.struct(dict.fromkeys(("id", "post", "title", "subreddit", "site", "article"), STRING)),
    "summaries": pa.list_(pa.struct(dict.fromkeys(("text", "policy", "note"), STRING))),
    "choice": pa.int32(),
    "worker": STRING,
    "batch": STRING,
    "split": STRING,
    "extra": pa.struct({"confidence": pa.int32()}),
}
AXES = dict.fromkeys(("overall", "accuracy", "coverage", "coherence"), pa.int32()) | {
    "compatible": pa.bool_()
}
"""Columns of the ratings beside the comparisons, which must not be read with them."""

Rows = Sequence[Mapping[str, Any]]


def write_parquet(path: Path, rows: Rows, types: Mapping[str, pa.DataType] | None = None) -> None:
    """Write a parquet file, with the types or with those that are inferred."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(list(types.items())) if types else None
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def write_lines(path: Path, rows: Rows) -> None:
    """Write JSON lines, compressed if the path says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def plain(numbers: Iterable[int], **more: Any) -> list[dict[str, Any]]:
    """Rows of prompt, chosen and rejected."""
    return [
        {"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": worse("no", n)} | more for n in numbers
    ]


def worse(answer: str, number: int) -> str:
    """The rejected answer of a row, which is the longer one in every second row."""
    return f"{answer} {number}" if number % 2 else f"{answer}, and here is why: {number}"


def write_tldr(hub: Path, splits: Mapping[str, Rows], posts: Mapping[str, Rows]) -> None:
    """Write openai/summarize_from_feedback's comparisons with its ratings, and trl-lib/tldr's posts.

    Args:
        hub: folder of the data sets.
        splits: comparisons of the splits train and validation.
        posts: posts of the splits train and test.
    """
    repository = hub / "openai" / "summarize_from_feedback"
    for split, rows in splits.items():
        write_parquet(repository / "comparisons" / split / "0000.parquet", rows, COMPARISONS)
    info = next(iter(splits.values()))[0]["info"]
    rating = {"info": info, "worker": "w", "summary": {"text": "t", "axes": {"overall": 3}}}
    summary = pa.struct({"text": STRING, "policy": STRING, "note": STRING, "axes": pa.struct(AXES)})
    ratings = {"info": COMPARISONS["info"], "worker": STRING, "summary": summary}
    for split in ("test", "validation"):
        write_parquet(repository / "axis" / split / "0000.parquet", [rating], ratings)
    for split, rows in posts.items():
        write_parquet(hub / f"trl-lib/tldr/data/{split}-00000-of-00001.parquet", rows)


def comparisons(workers: Sequence[str], pairs: int, start: int = 0) -> list[dict[str, Any]]:
    """Comparisons of summaries of posts of their own, as many by each worker."""
    rows = []
    for number in range(start, start + pairs * len(workers)):
        worker = workers[number % len(workers)]
        info = {"id": f"t3_{number}", "title": f"title {number}", "subreddit": "tales", "site": None}
        rows.append(
            {
                "info": info | {"post": f"It rained {number} times.", "article": None},
                "summaries": [
                    {"text": f"Rain, {number} times.", "policy": "a", "note": None},
                    {"text": worse("It did", number // 2), "policy": "b", "note": None},
                ],
                "choice": number % 2,
                "worker": worker,
                "batch": "batch3",
                "split": "train",
                "extra": {"confidence": 1 + number % 9},
            }
        )
    return rows


def posts(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Posts of TL;DR with their authors' summaries."""
    return [
        {
            "prompt": f"SUBREDDIT: r/tales\n\nTITLE: post {n}\n\nPOST: It snowed {n} times.\n\nTL;DR:",
            "completion": f" Snow, {n} times.",
        }
        for n in numbers
    ]


def write_shp(hub: Path, splits: Mapping[str, Rows]) -> None:
    """Write stanfordnlp/SHP: a folder of each subreddit with a file of each split."""
    for split, rows in splits.items():
        for subreddit in sorted({_subreddit(row) for row in rows}):
            own = [row for row in rows if _subreddit(row) == subreddit]
            write_lines(hub / "stanfordnlp" / "SHP" / subreddit / f"{split}.json", own)


def _subreddit(row: Mapping[str, Any]) -> str:
    return str(row["domain"]).rsplit("_", 1)[0]


def votes(questions: Iterable[int], split: str) -> list[dict[str, Any]]:
    """Two answers to each question, in one of three subreddits."""
    rows = []
    for n in questions:
        domain = ("askbaking", "askphysics", "legaladvice")[n % 3]
        better = n % 2
        rows.append(
            {
                "post_id": f"p{n}",
                "domain": f"{domain}_{split}",
                "upvote_ratio": 0.9,
                "history": f"Why is it {n}?",
                "c_root_id_A": f"a{n}",
                "c_root_id_B": f"b{n}",
                "created_at_utc_A": 1,
                "created_at_utc_B": 2,
                "score_A": 9 if better else 3,
                "score_B": 3 if better else 9,
                "human_ref_A": f"Because of {n}.",
                "human_ref_B": worse("By law", n // 2),
                "labels": better,
                "seconds_difference": 1.0,
                "score_ratio": 3.0,
            }
        )
    return rows


def write_hh(hub: Path, subset: str, splits: Mapping[str, Rows]) -> None:
    """Write a folder of Anthropic/hh-rlhf, beside the transcripts of its red team."""
    repository = hub / "Anthropic" / "hh-rlhf"
    for split, rows in splits.items():
        write_lines(repository / subset / f"{split}.jsonl.gz", rows)
    attempt = [{"transcript": "t", "rating": 1.0}]
    write_lines(repository / "red-team-attempts" / "red_team_attempts.jsonl.gz", attempt)


def dialogues(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Dialogues of one question."""
    return [
        {
            "chosen": f"\n\nHuman: question {n}\n\nAssistant: yes {n}",
            "rejected": f"\n\nHuman: question {n}\n\nAssistant: {worse('no', n)}",
        }
        for n in numbers
    ]


def write_imdb(hub: Path, splits: Mapping[str, Iterable[int]]) -> None:
    """Write yuasosnin/imdb-dpo, whose completions begin with their prompts."""
    types = dict.fromkeys(("prompt", "chosen", "rejected"), STRING)
    types |= dict.fromkeys(("chosen_reward", "rejected_reward"), pa.float32())
    for split, numbers in splits.items():
        rows = [
            {
                "prompt": f"I saw film {n} and",
                "chosen": f"I saw film {n} and liked it {n}",
                "rejected": f"I saw film {n} and {worse('left', n)}",
                "chosen_reward": 2.0 + n % 7,
                "rejected_reward": -1.5,
            }
            for n in numbers
        ]
        write_parquet(hub / "yuasosnin/imdb-dpo/data" / f"{split}-00000-of-00001.parquet", rows, types)


def write_ultrafeedback(hub: Path, train: Iterable[int], test: Iterable[int]) -> None:
    """Write kaitchup/UltraFeedback-prompt-chosen-rejected."""
    repository = hub / "kaitchup" / "UltraFeedback-prompt-chosen-rejected" / "data"
    write_parquet(repository / "train-00000-of-00001-219261181a100452.parquet", plain(train))
    write_parquet(repository / "test-00000-of-00001-6cf4cbe421a6a6b5.parquet", plain(test))


def write_webgpt(hub: Path, numbers: Iterable[int]) -> None:
    """Write openai/webgpt_comparisons."""
    rows = [
        {
            "question": {"dataset": "eli5", "id": str(n), "full_text": f"why {n}?"},
            "answer_0": f"because {n}",
            "score_0": 0.5,
            "answer_1": worse("who knows", n),
            "score_1": -0.5,
        }
        for n in numbers
    ]
    write_parquet(hub / "openai" / "webgpt_comparisons" / "default/train/0000.parquet", rows, WEBGPT)


def write_py_dpo(hub: Path, numbers: Iterable[int]) -> None:
    """Write jondurbin/py-dpo-v0.1."""
    write_parquet(hub / "jondurbin" / "py-dpo-v0.1" / "py-dpo.parquet", plain(numbers, id="x"))


def write_code_vulnerability(hub: Path, numbers: Iterable[int], languages: Sequence[str] = ("c++",)) -> None:
    """Write CyberNative/Code_Vulnerability_Security_DPO, with the languages in turn."""
    rows = [
        {
            "lang": languages[n % len(languages)],
            "vulnerability": "overflow",
            "system": "",
            "question": f"write program {n}",
            "chosen": f"safe {n}",
            "rejected": worse("bad", n),
        }
        for n in numbers
    ]
    folder = hub / "CyberNative" / "Code_Vulnerability_Security_DPO"
    write_lines(folder / "secure_programming_dpo.json", rows)


def write_safe_rlhf_prompts(hub: Path, numbers: Iterable[int]) -> None:
    """Write PKU-Alignment/PKU-SafeRLHF-prompt, which has a picture beside its file."""
    folder = hub / "PKU-Alignment" / "PKU-SafeRLHF-prompt"
    rows = [{"prompt": f"how {n}?", "prompt_source": "s"} for n in numbers]
    write_lines(folder / "data" / "PKU-SafeRLHF-prompts.jsonl", rows)
    (folder / "pipeline.png").write_bytes(b"\x89PNG")


def alpaca_eval_rows(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Outputs of a model in AlpacaEval's schema."""
    return [
        {
            "dataset": "helpful_base",
            "instruction": f"Tell me about {n}.",
            "output": f"It is {n}.",
            "generator": "gpt4_1106_preview",
        }
        for n in numbers
    ]
