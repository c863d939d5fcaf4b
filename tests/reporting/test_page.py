"""Pages: tables, charts and answers as HTML, markdown and text."""

import json
import re
from html.parser import HTMLParser

import pytest

from components.evaluation.charts import line_chart
from components.reporting.page import (
    Answers,
    Chart,
    Code,
    Notes,
    Page,
    PageSection,
    Table,
    cell_class,
    fenced,
    text_table,
    to_html,
    to_markdown,
)

WIDE = Table("Means", ["method", *(f"c{n}" for n in range(10)), "empty"], [["A", *map(str, range(10)), "-"]])
PARTS = [
    Table("Counts <1>", ["", "before", "after"], [["worst | client", "0.5", "0.6"]], "what <it> shows"),
    WIDE,
    Chart(
        line_chart("Loss </script>", "round", "nats", [("<b>ada</b>", 1, 1.0), ("<b>ada</b>", 2, 0.5)]),
        "a chart",
    ),
    Answers(
        "a <prompt>\nof two lines",
        {"base": "<i>one</i>", "aligned": "two"},
        {"aligned against base": "aligned"},
    ),
    Code("Recipe", "seed: 0", is_folded=True),
    Notes(["a note"]),
]
PAGE = Page(
    "B <1>",
    "of a test",
    [PageSection("All parts", "What it tells.", PARTS), PageSection("Nothing", "No.", [])],
)


class Elements(HTMLParser):
    """The elements of a page, and the texts outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.texts.append(data.strip())

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def html():
    return Elements(to_html(PAGE))


def test_a_table_leaves_out_empty_columns_and_has_eight_in_view():
    table = Table("t", ["", "a", "b"], [["", "-", "1"], ["", "", "2"]])
    assert table.filled().header == ["", "b"]
    assert table.filled().rows == [["", "1"], ["", "2"]]
    view, every = WIDE.filled().split()
    assert len(view.header) == 8
    assert every.header == WIDE.header[:-1]
    assert every.title == "All 11 columns"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("holds [0.1, 0.2]", "holds"),
        ("undecided (one seed)", "undecided"),
        ("0.850 ± 0.071", "number"),
        ("65.6% [50.0%, 81.2%]", "number"),
        ("21/9/2", "number"),
        ("1,234", "number"),
        ("12.5 s", "number"),
        ("holdings", ""),
        ("3 rounds", ""),
    ],
)
def test_the_class_of_a_cell_is_its_verdict_or_that_it_is_a_number(text, kind):
    assert cell_class(text) == kind


def test_the_html_needs_no_other_file_and_fits_narrow_screens_in_its_language(html):
    assert not [one for one in html.of("script") if "src" in one]
    assert not html.of("link") + html.of("img")
    assert html.of("html") == [{"lang": "en"}]
    assert any(one.get("name") == "viewport" for one in html.of("meta"))
    style = to_html(PAGE)
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style


def test_texts_are_escaped_and_a_chart_has_a_description_and_data_that_end_no_script(html):
    for text in ("B <1>", "Counts <1>", "what <it> shows", "a <prompt>\nof two lines", "<i>one</i>"):
        assert text in html.texts
    (chart,) = [one for one in html.of("div") if one.get("role") == "img"]
    assert chart["aria-label"] == "Loss </script>. a chart"
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', to_html(PAGE), re.DOTALL)[1]
    assert json.loads(data)["layout"]["title"]["text"] == "Loss &lt;/script&gt;"


def test_rows_and_columns_have_headers_with_a_scope_and_sections_with_parts_have_links(html):
    scopes = [one.get("scope") for one in html.of("th")]
    assert None not in scopes
    assert scopes.count("row") == 3
    assert [one["href"] for one in html.of("a")] == ["#all-parts"]
    assert [one["id"] for one in html.of("section")] == ["all-parts"]


def test_a_page_without_charts_has_no_scripts():
    page = Page("t", "", [PageSection("S", "", [Notes(["a note"])])])
    assert not Elements(to_html(page)).of("script")


def test_the_markdown_has_all_but_the_charts():
    lines = to_markdown(PAGE).splitlines()
    assert "| worst \\| client | 0.5 | 0.6 |" in lines
    assert "> a &lt;prompt> of two lines" in lines
    assert "- **aligned**: two" in lines
    assert "- aligned against base: aligned" in lines
    assert "seed: 0" in lines
    assert "- a note" in lines
    assert "## Nothing" not in lines


def test_a_table_of_text_has_aligned_columns_and_its_title_above_the_first():
    table = Table(
        "Accuracy",
        ["", "before", "x", "after"],
        [["mean", "0.5", "", "0.75"], ["worst client", "-", "", "1"]],
    )
    assert text_table(table) == [
        "Accuracy        before  after",
        "  mean             0.5   0.75",
        "  worst client       -      1",
    ]


def test_the_answers_to_three_prompts_are_open():
    """And those to the others are folded, section by section."""
    section = PageSection("Answers", "All.", [Answers(f"prompt {n}", {"base": "text"}) for n in range(5)])
    page = Elements(to_html(Page("t", "", [section, section])))
    folds = [own for own in page.of("details") if own.get("class") == "answers"]
    assert ["open" in own for own in folds] == [True, True, True, False, False] * 2
    assert page.texts.count("Prompt 5") == 2


def test_markdown_has_no_html_of_prompts_answers_and_names():
    tag = "<script>alert(1)</script>"
    table = Table(tag, ["", tag], [[tag, "p < 0.05"]], caption=tag)
    parts = [table, Answers(tag, {tag: tag}, {tag: tag}), Notes([tag])]
    markdown = to_markdown(Page(tag, tag, [PageSection("Results", "All of it.", parts)]))
    assert "<script" not in markdown
    assert markdown.count("&lt;script>alert(1)&lt;/script>") == 12
    assert "p < 0.05" in markdown


def test_no_line_of_a_code_block_ends_it():
    text = "a\n  ```\n<script>\n````\nb"
    assert fenced(text) == f"`````\n{text}\n`````"
    assert fenced("a") == "```\na\n```"
