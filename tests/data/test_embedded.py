"""The embedded sources, on the installed packages."""

import importlib.machinery
import json
import re
from collections import Counter, defaultdict

import pytest

from components.config import DataConfig, RecipeError
from components.data import sources
from components.data.records import DataError
from components.data.same_text import same_text
from components.data.sources import aclsum, chitchat
from components.data.sources.detokenize import detokenize, is_sentence
from tests.support.sources import data_config


@pytest.mark.parametrize(
    ("tokenized", "natural"),
    [
        ("models ( LMs ) reach 45 % , or more .", "models (LMs) reach 45%, or more."),
        ('the " exposure bias " problem ( " Why ? " ) .', 'the "exposure bias" problem ("Why?").'),
        (
            "Spearman 's rho ; patterns ' meaning ; they do n't .",
            "Spearman's rho; patterns' meaning; they don't.",
        ),
        ("tasks : ' No Subject ' e-mails", "tasks: 'No Subject' e-mails"),
        ("( operator / operand )", "(operator/operand)"),
        ("within 1 - 5 F 1 points", "within 1-5 F1 points"),
        ("architecture -the network", "architecture - the network"),
        ("For $ 10 we can not stop ...", "For $10 we cannot stop..."),
        ("``quoted''  text", '"quoted" text'),
    ],
)
def test_detokenizing_restores_natural_spacing(tokenized, natural):
    assert detokenize(tokenized) == natural
    assert detokenize(natural) == natural


def test_footnote_marks_are_no_sentences():
    assert [is_sentence(s) for s in ("1", "1 *", "†", "Groundsman .")] == [False, False, False, True]


@pytest.fixture(scope="module")
def papers():
    return aclsum.read_papers()


@pytest.fixture(scope="module")
def annotators():
    return sources.load(DataConfig(source="aclsum"), 0)


def test_spacing_does_not_tell_a_summary_from_a_sentence(papers):
    odd = re.compile(r" [,.;:?!%)\]](?: |$)|[(\[] |\s\s|^\s|\s$")
    assert len(papers) == 250
    for paper in papers:
        for text in (paper.lead, *paper.summaries.values()):
            assert not odd.search(text), text


def test_half_of_an_annotators_pairs_are_common_taste_and_half_its_own(annotators):
    for split in ("train", "validation", "test"):
        counts = Counter((r.client_id, r.domain) for r in annotators.pairs if r.split == split)
        assert len(counts) == 24
        assert len(set(counts.values())) == 1
    assert len(annotators.pairs) == 12 * 4 * (16 + 2 + 5)
    assert len(annotators.judge) == 6 * 4 * 45


def test_aclsum_prefers_the_whole_summary_and_the_annotators_aspect(annotators, papers):
    by_prompt = {paper.prompt: paper for paper in papers}
    for rows, aspect_of in (
        (annotators.pairs, annotators.true_clusters),
        (annotators.judge, {f"judge-{i:02d}": aclsum.ASPECTS[i % 3] for i in range(6)}),
    ):
        for row in rows:
            paper = by_prompt[row.prompt]
            summaries = set(paper.summaries.values())
            assert row.chosen in summaries
            if row.domain == "own":
                assert row.chosen == paper.summaries[aspect_of[row.client_id]]
                assert row.rejected in summaries
            else:
                assert row.rejected == paper.lead or row.chosen.startswith(row.rejected.rstrip(".!?"))


def test_a_truncated_summary_ends_with_the_mark_of_the_whole_summary(annotators):
    assert aclsum.truncate("One two, three four.", 0.5) == "One two."
    assert aclsum.truncate("One two three?", 0.01) == "One?"
    common = [row for row in annotators.pairs if row.domain == "common"]
    assert sum(row.rejected[-1] in ".!?" for row in common) >= 0.98 * sum(
        row.chosen[-1] in ".!?" for row in common
    )


def test_the_share_of_first_sentences_among_common_pairs_is_the_options(annotators, papers):
    leads = {paper.lead for paper in papers}
    common = [row for row in annotators.pairs if row.domain == "common"]
    assert 0.2 < sum(row.rejected in leads for row in common) / len(common) < 0.3


def test_no_paper_serves_two_purposes_and_aclsum_is_a_function_of_the_seed(annotators):
    uses = defaultdict(set)
    for kind in ("pairs", "judge", "prompts"):
        for row in getattr(annotators, kind):
            uses[row.prompt].add(f"judge {row.split}" if kind == "judge" else row.split)
    assert Counter(map(len, uses.values())).keys() == {1}
    assert Counter(row.split for row in annotators.prompts) == {"align": 60, "test": 40}
    again, other = (sources.load(DataConfig(source="aclsum"), seed) for seed in (0, 1))
    assert again.pairs == annotators.pairs
    assert again.prompts == annotators.prompts
    assert other.pairs != annotators.pairs


def test_aclsum_has_one_annotator_per_client_and_refuses_more_papers_than_the_data_have():
    data = sources.load(DataConfig(source="aclsum", clients=5, options={"papers_per_annotator": 2}), 0)
    assert data.true_clusters == {f"annotator-{i:02d}": aclsum.ASPECTS[i % 3] for i in range(5)}
    with pytest.raises(RecipeError, match=r"papers_per_annotator .* it is 91, but train_papers is only 90"):
        data_config(source="aclsum", options={"papers_per_annotator": 91})
    with pytest.raises(DataError, match=r"asks for 251 papers .*, but aclsum has 250"):
        sources.load(DataConfig(source="aclsum", options={"align_prompts": 61}), 0)


@pytest.mark.parametrize("name", ["aclsum", "chitchat"])
def test_a_missing_data_package_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"make install, or pip install -e '.\[demo\]'"):
        sources.load(DataConfig(source=name), 0)


TALKS = {
    f"talk-{t:02d}": {
        "prompt": "Sea or hills?",
        "messages": [
            [{"text": f"Hello, this is talk {t} and I like hills", "sender": "zoe"}],
            [
                {"text": f"I prefer the sea in talk {t} myself", "sender": person},
                {"text": "always", "sender": person},
            ],
            [{"text": f"But why would one say so {t}", "sender": "zoe"}],
            [{"text": f"Because of the salt and number {t}", "sender": person}],
            [{"text": "ok", "sender": "zoe"}],
        ],
    }
    for t, person in enumerate(["ann", "bob", "cem"] * 12)
}


@pytest.fixture
def talks(tmp_path, monkeypatch):
    (tmp_path / "dataset.json").write_text(json.dumps(TALKS))
    spec = importlib.machinery.ModuleSpec("chitchat_dataset", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)


def people(seed=0, **options):
    small = {"min_pairs": 4, "judge_participants": 0, "align_prompts": 0, "evaluation_prompts": 1}
    return sources.load(DataConfig(source="chitchat", clients=3, options=small | options), seed)


def pairs_of_all(replies):
    """The pairs of the three participants whose replies are long enough."""
    pairs = []
    for person in ("ann", "bob", "cem"):
        own = [reply for reply in replies if reply.person == person]
        pairs += chitchat.person_pairs(own, dict.fromkeys(TALKS, "train"), 4, 0)
    return pairs


def test_a_participants_chosen_reply_answered_this_prompt_and_the_rejected_one_another_conversation(talks):
    replies = {reply.prompt: reply for reply in chitchat.read_replies(4, 4, 100)}
    by_text = {reply.text: reply for reply in replies.values()}
    pairs = pairs_of_all(replies.values())
    assert len(pairs) == 3 * 24
    for pair in pairs:
        assert pair.chosen == replies[pair.prompt].text
        assert by_text[pair.rejected].person == pair.client_id
        assert by_text[pair.rejected].conversation != pair.group
    assert Counter(pair.chosen for pair in pairs) == Counter(pair.rejected for pair in pairs)


def test_a_chitchat_prompt_shows_who_said_what_and_ends_with_the_other_person(talks):
    replies = chitchat.read_replies(2, 4, 100)
    reply = next(r for r in replies if r.text.startswith("Because of the salt and number 3"))
    assert reply.prompt == (
        "TOPIC: Sea or hills?\nYOU: I prefer the sea in talk 3 myself always\n"
        "THEY: But why would one say so 3"
    )


def test_a_reply_to_a_prompt_that_came_up_in_other_case_is_left_out(talks, tmp_path):
    cased = {}
    for n, (name, talk) in enumerate(TALKS.items()):
        hello = "Hello" if n % 2 else "HELLO"
        text = json.dumps(talk).replace(f"Hello, this is talk {n}", f"{hello}, this is talk {n // 9}")
        cased[name] = json.loads(text)
    (tmp_path / "dataset.json").write_text(json.dumps(cased))
    replies = chitchat.read_replies(4, 4, 100)
    pairs = pairs_of_all(replies)
    prompts = [same_text(pair.prompt) for pair in pairs]
    assert any(reply.repeated_prompt for reply in replies)
    assert len(prompts) == len(set(prompts)) > 30
    assert Counter(pair.chosen for pair in pairs) == Counter(pair.rejected for pair in pairs)


def test_chitchat_refuses_more_clients_judges_or_prompts_than_people_allow(talks):
    with pytest.raises(DataError, match="too few for 3 clients and 9 judges"):
        people(judge_participants=9)
    with pytest.raises(DataError, match="asks for 1 prompts: lower"):
        people()  # everyone here is a client or speaks with one


def test_the_real_conversations_give_clients_judges_and_prompts_of_different_people():
    data = sources.load(DataConfig(source="chitchat", clients=30), 0)
    assert len({row.client_id for row in data.pairs}) == 30
    assert len({row.client_id for row in data.judge}) == 20
    assert not {row.client_id for row in data.pairs} & {row.client_id for row in data.judge}
    assert Counter(row.split for row in data.prompts) == {"align": 200, "test": 100}
    splits = defaultdict(set)
    for row in (*data.pairs, *data.judge):
        splits[row.group].add(row.split)
    assert all(len(s) == 1 for s in splits.values())
    splits_by_prompt = defaultdict(set)
    for row in (*data.pairs, *data.judge, *data.prompts):
        splits_by_prompt[same_text(row.prompt)].add(row.split)
    assert all(len(s) == 1 for s in splits_by_prompt.values())
    assert min(Counter(row.client_id for row in data.pairs).values()) >= 20


def test_a_prompt_has_the_request_and_the_first_words_of_the_abstract(annotators):
    assert aclsum.show("T", "one two  three") == "TITLE: T\nABSTRACT: one two  three"
    assert aclsum.show("T", "one two three", " Sum up. ", 2) == "Sum up.\n\nTITLE: T\nABSTRACT: one two ..."
    assert aclsum.show("T", "one two three", "", 3) == "TITLE: T\nABSTRACT: one two three"
    assert aclsum.show("T", "one two three", abstract_words=0) == "TITLE: T"
    short = sources.load(DataConfig(source="aclsum", options={"request": "Sum up.", "abstract_words": 5}), 0)
    assert [(r.chosen, r.rejected, r.client_id, r.split) for r in short.pairs] == [
        (r.chosen, r.rejected, r.client_id, r.split) for r in annotators.pairs
    ]
    assert all(
        r.prompt.startswith("Sum up.\n\nTITLE: ") and len(r.prompt.split("ABSTRACT: ")[1].split()) <= 6
        for r in short.pairs
    )


def test_judges_of_the_common_taste_alone_give_no_pairs_of_their_own_tastes():
    both, common = (
        sources.load(data_config(options={"judge_own_taste": own_taste}), 0).judge
        for own_taste in (True, False)
    )
    assert {row.domain for row in common} == {"common"}
    assert common == [row for row in both if row.domain == "common"]
