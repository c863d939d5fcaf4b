"""Encodings of names: what each place accepts, and that different names stay different."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_logged_model_name, _validate_metric, _validate_param

from components.names import (
    file_name,
    markdown_text,
    mlflow_key,
    mlflow_model,
    plotly_text,
    short_labels,
)
from tests.support.odd_names import ODD_NAMES, SHARED_START
from tests.support.properties import PROPERTY

NAMES = (
    *ODD_NAMES,
    SHARED_START,
    ".",
    "",
    "all",
    "con",
    "com1",
    "a/b",
    "a_b",
    "a//b",
    "/",
    "-rf",
    " a",
    "a ",
    "a.",
    "e\u0301",
    "\u00e9",
    "a@b",
    "a_u40_b",
    "a_u5f_u40_b",
    "_u_",
    "_u@",
    "_u2e_",
    "a_u40@",
    "a@u40_",
)
ENCODINGS = (file_name, mlflow_key, mlflow_model)
ODD_TEXTS = st.text(alphabet="au_h4025fAé研 ./@%$'-", max_size=12)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_different_names_stay_different_after_an_encoding_and_when_it_is_repeated(encoding):
    names = {*NAMES, *map(file_name, NAMES), *map(mlflow_key, NAMES), *map(mlflow_model, NAMES)}
    assert len({encoding(name) for name in names}) == len(names)


@pytest.mark.parametrize("encoding", ENCODINGS)
@PROPERTY
@given(one=ODD_TEXTS, other=ODD_TEXTS)
def test_any_two_names_stay_different(encoding, one, other):
    assert (encoding(one) == encoding(other)) == (one == other)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_encodings_of_all_short_texts_of_the_characters_of_an_escape_differ(encoding):
    texts = ["".join(text) for n in range(6) for text in itertools.product("_u4@h", repeat=n)]
    assert len(set(map(encoding, texts))) == len(texts)


def test_file_names_differ_where_case_is_ignored_and_plain_names_are_kept():
    names = [file_name(name) for name in NAMES]
    assert len({name.lower() for name in names}) == len(NAMES)
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*|-[0-9a-f]{16}", name) for name in names)
    assert max(map(len, names)) <= 77
    assert not {name.lower() for name in names} & {"con", "com1"}
    assert [file_name(name) for name in ("policy", "selector-0", "worker_12")] == [
        "policy",
        "selector-0",
        "worker_12",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_mlflow_accepts_encoded_names(name):
    _validate_metric(mlflow_key(f"accuracy/domain/{name}"), 0.5, 0, 0)
    _validate_metric(mlflow_key(name), 0.5, 0, 0)
    _validate_param(mlflow_key(f"data.column_clients.{name}"), "1")
    _validate_logged_model_name(mlflow_model(f"{name}-round-1"))


def test_names_of_metrics_keep_what_mlflow_accepts():
    for name in ("server/研究者-一/own_weight", "rewards: مستخدم", "a.b/c d", "accuracy_u/worst_user"):
        assert mlflow_key(name) == name
    assert mlflow_key("accuracy/domain/a@b") == "accuracy/domain/a_u40_b"
    assert mlflow_model("研究者-round-1") == "研究者-round-1"


def test_a_text_of_plotly_has_no_tag_formula_or_field_and_plain_quotes():
    assert plotly_text('<b>$x$</b> %{y} O\'Brien "q" &amp;') == (
        '&lt;b&gt;&#36;x&#36;&lt;/b&gt; &#37;{y} O\'Brien "q" &amp;amp;'
    )


def test_labels_are_short_and_differ():
    names = ["x" * 100 + "1", "x" * 100 + "2", "x" * 59 + "…", "ada", "x" * 60]
    labels = short_labels(names)
    assert list(labels) == names
    assert len(set(labels.values())) == len(names)
    assert max(map(len, labels.values())) == 60
    assert [labels[name] for name in names[2:]] == names[2:]


def test_markdown_shows_a_name_as_it_is():
    assert markdown_text("a|b `c` *d* $e$ \\f [g](h) <b> _i_ snake_case") == (
        "a\\|b \\`c\\` \\*d\\* \\$e\\$ \\\\f [g\\](h) &lt;b> \\_i\\_ snake_case"
    )
