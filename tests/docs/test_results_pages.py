"""The pages of results are what the collected lines give; `make lint` compares them."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from components.config import UserError
from components.paths import PACKAGE
from components.reporting.claims import FAILS, HOLDS, UNDECIDED, Finding
from docs.generate_results import (
    FLOWER,
    FOLDER,
    PAPERS,
    SAMPLING,
    SPEED,
    TRL,
    FamilyResults,
    Results,
    counts_sentence,
    draw_claims,
    draw_speed,
    own_settings,
    speed,
)
from perf.campaign.lines import PUBLISHED
from perf.campaign.plan import LIST, Campaign, read_campaign

DECISIVE = "summarization-decisive"


@pytest.fixture(scope="module")
def results():
    """The results of the project's campaign."""
    return Results(read_campaign(LIST, Path("campaign")), PACKAGE / PUBLISHED)


def finding(verdict, value=0.5, low=0.4, high=0.6, figure="wins", limit=0.5):
    return Finding(f"A: {figure} above {limit}", figure, limit, verdict, value, low, high, "", "-", "-", "-")


def test_a_picture_follows_the_opening_sentence_of_every_page():
    for page in ("index.md", *(page for page, _ in PAPERS.values())):
        _, mark, _, picture, *_ = (FOLDER / page).read_text(encoding="utf-8").split("\n\n")
        assert mark.startswith("<!-- results: ")
        assert (FOLDER / picture.partition("(")[2].rstrip(")")).is_file()


def test_every_claim_is_on_a_page(results):
    texts = {page: (FOLDER / page).read_text(encoding="utf-8") for page, _ in PAPERS.values()}
    for name, family in results.families.items():
        mark = f"<!-- results: claims {name} -->"
        pages = [page for page, text in texts.items() if mark in text]
        assert len(pages) == bool(family.benchmark.claims), name
    for page, names in PAPERS.values():
        assert all(f"<!-- results: claims {name} -->" in texts[page] for name in names)


def test_a_sentence_counts_the_verdicts():
    findings = [finding(HOLDS), finding(FAILS), finding(FAILS), finding(UNDECIDED, None, None, None)]
    words = counts_sentence("claims", findings)
    assert words == "Of 4 claims, 1 holds, 2 fail and 1 is undecided, of which 1 was not measured."
    assert counts_sentence("claims", [finding(HOLDS)]) == "Of 1 claims, 1 holds, 0 fail and 0 are undecided."


def test_ratios_are_given_for_each_machine_and_the_last_ones_count(tmp_path):
    lines = [("A", [1.0]), ("B", [2.0, 3.0, 7.0]), ("A", [4.0])]
    conditions = {"recipe": "debug", "cores": "2", "commit": "0123456789abcdef"}
    ratios = [
        conditions | {"processor": processor, "ratios": dict.fromkeys((FLOWER, TRL, SAMPLING), values)}
        for processor, values in lines
    ]
    (tmp_path / SPEED).write_text("\n".join(map(json.dumps, ratios)), encoding="utf-8")
    sentence, _, *tables = speed(Results(Campaign({}, LIST, tmp_path), tmp_path), []).split("\n\n")
    assert sentence == (
        "A round of FedBis is 4.0 and 3.0 times as fast as in a tuned Flower app, a client of FedDPO 4.0 and"
        " 3.0 times as fast as with TRL's trainer, and sampling 4.0 and 3.0 times as fast as by transformers'"
        " batches (A, 2 cores; B, 2 cores)."
    )
    assert tables[0] == "Recipe `debug`, A, 2 cores, commit 0123456789ab:"
    picture = draw_speed(Results(Campaign({}, LIST, tmp_path), tmp_path))
    assert all(f"<!-- {machine}, 2 cores -->".encode() in picture for machine in "AB")
    assert f"| `{TRL}` | 3.00 | 2.00, 3.00, 7.00 |" in tables[3]
    del ratios[1]["ratios"][TRL]
    (tmp_path / SPEED).write_text("\n".join(map(json.dumps, ratios)), encoding="utf-8")
    with pytest.raises(
        UserError, match=f"lacks {TRL} of B, 2 cores: record it there by python -m perf peers"
    ):
        speed(Results(Campaign({}, LIST, tmp_path), tmp_path), [])
    (tmp_path / SPEED).unlink()
    with pytest.raises(UserError, match=f"lacks {FLOWER} of any machine"):
        speed(Results(Campaign({}, LIST, tmp_path), tmp_path), [])


@own_settings()
def test_a_picture_has_the_measured_claims_on_each_figure():
    """Equal claims give equal files, and another interval another one."""
    findings = [finding(HOLDS), finding(FAILS, figure="KL", limit=2.0), finding(UNDECIDED, None, None, None)]
    picture = draw_claims(findings)
    groups = [each.get("id", "") for each in ElementTree.fromstring(picture).iter()]
    assert sum(name.startswith("axes_") for name in groups) == 2
    assert draw_claims(findings) == picture
    assert draw_claims([finding(HOLDS, low=0.45), *findings[1:]]) != picture
    assert draw_claims([finding(HOLDS, low=0.40004), *findings[1:]]) == picture


def test_missing_hours_follow_from_finished_runs_of_the_arm_or_the_estimate(results):
    benchmark = results.families[DECISIVE].benchmark.model_copy(update={"seeds": [0, 1]})
    line = {"kind": "run", "arm": "FedBis", "seed": 0, "seconds": 7200}
    family = FamilyResults("all", benchmark, 30, [line])
    assert len(family.missing) == len(family.runs) - 1 == 7
    assert family.missing_hours == pytest.approx(2 + 6 * 0.5)
    assert math.isnan(FamilyResults("all", benchmark, math.nan, [line]).missing_hours)
