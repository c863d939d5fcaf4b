"""Dialogues that are read as one turn."""

from datasets import Dataset

from components.evaluation.pair_warnings import dialogue_warnings
from components.recipes import load_recipe
from tests.support.prepared import pairs_by_owner, server_prompts, write_prepared

OWNERS = {"ada": {"train": 6, "test": 2}, "bea": {"train": 4, "validation": 2}}


def write(folder, clients):
    """A prepared folder with these pairs of the clients."""
    write_prepared(folder)
    Dataset.from_list(list(clients)).to_parquet(folder / "pairs.parquet")
    return folder


def test_prompts_whose_turns_are_not_recognized_are_a_warning_with_their_number(tmp_path):
    rows = pairs_by_owner(OWNERS)
    folder = write(tmp_path, [rows[0] | {"prompt": "Human: Hi. Assistant: Ho. Human: Hi."}, *rows[1:]])
    prompts = server_prompts(3)
    prompts[0]["prompt"] = "Why? Assistant: So."
    Dataset.from_list(prompts).to_parquet(folder / "prompts.parquet")
    (warning,) = dialogue_warnings(load_recipe("debug", ["policy.chat=turns"]), folder)
    assert warning.startswith("2 of 20 prompts are read as one turn of the user")
    assert "Hi." not in warning
    assert "So." not in warning, "texts of owners stay out of logs"
    assert dialogue_warnings(load_recipe("debug"), folder) == []


def test_turns_of_one_speaker_in_a_row_are_a_warning_with_their_number(tmp_path):
    quoted = "Human: Hi.\n\nAssistant: She said\n\nAssistant: is a word.\n\nHuman: Ok?"
    rows = pairs_by_owner(OWNERS)
    folder = write(tmp_path, [rows[0] | {"prompt": quoted}, *rows[1:]])
    (warning,) = dialogue_warnings(load_recipe("debug", ["policy.chat=turns"]), folder)
    assert " prompts have two turns of one speaker in a row" in warning
    assert warning.startswith("1 of ")
    assert "is a word" not in warning
