"""The files that a recipe names count by their bytes, from the start of a run to its end."""

import shutil
import types
import typing
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from components.config import (
    DpoObjective,
    InputFile,
    NamedModel,
    PairPpoObjective,
    Recipe,
    RecipeError,
    TemplateFile,
)
from components.config.local_objectives import OfflinePpoObjective
from components.config.recipe_files import RecipeFile
from components.data.records import DataError
from components.data.templates import load as load_template
from components.models.backbone import fetch_backbone
from components.recipes import load_recipe
from components.recipes.inputs import named_files, original_names, verify_inputs
from tasks.runs import Run, create_run, write_stage_inputs
from tests.support.command_line import refusal
from tests.support.registries import config_registries

NAMES_NO_FILE = {
    "Recipe.name": "of the experiment",
    "revision": "a commit or tag of the hub",
    "owners": "their names",
    "sockets": "a folder of this machine, from which no run is repeated",
    "split": "of a hub data set",
    "kind": "a registered implementation",
    "source": "a registered source",
    "method": "a registered method",
    "column": "a column of the data",
    "column_clients": "clients, and values of a column",
    "set": "a registered question set",
    "target_modules": "modules of a model",
    "sha256": "a hash",
    "base_url": "an endpoint",
    "api_key_env": "an environment variable",
    "PartConfig.name": "a client",
    "FunctionReward.name": "a registered function",
    "chat_date": "a day",
    "chat_template_kwargs": "arguments of a chat template",
    "system": "text of the system turn",
    "ClassifierReward.template": "the text itself",
    "TrainedReward.template": "the text itself",
    "objectives": "names of rewards",
    "columns": "columns of the user's own files",
    "preference": "names of objectives",
    "weights": "names of objectives",
    "rewards": "their names",
    "request": "fields of a request to an endpoint; of the source aclsum, a kind of prompt",
    "posts_revision": "a commit or tag of the hub",
    "subset": "a folder of the hub's data set",
    "AlpacaEvalPrompts.file": "a file of the hub's data set",
    "experiment": "an experiment of MLflow",
    "registered_model": "a model of MLflow",
    "devices": "of torch",
    "device_map": "layers of a model",
    "max_memory": "sizes",
    "ray_address": "a server",
    "transport": "a registered name",
}
"""Text keys of a recipe that name no file, with what they name."""
TEMPLATE = "Question: {prompt}\nAnswer:"
PAIRS = '{"prompt": "p", "chosen": "c", "rejected": "r"}\n'


def sections():
    """Every section that a recipe can have, those of registered implementations included."""
    models = [Recipe, DpoObjective, OfflinePpoObjective, PairPpoObjective]
    for registry in config_registries():
        models += [registry.load(name) for name in registry.builtin]
    found = {}
    while models:
        model = models.pop()
        if model in found or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        found[model] = None
        for field in model.model_fields.values():
            models += members(field.annotation)
    return list(found)


def members(annotation):
    """The types that an annotation is made of."""
    if typing.get_origin(annotation) is typing.Literal or isinstance(annotation, types.GenericAlias):
        arguments = () if typing.get_origin(annotation) is typing.Literal else typing.get_args(annotation)
    else:
        arguments = typing.get_args(annotation)
    if not arguments:
        return [annotation]
    return [member for argument in arguments for member in members(argument)]


def text_keys():
    """The keys of all sections that hold text which is not one of a few words, as 'Section.key'."""
    for section in sections():
        for name, field in section.model_fields.items():
            if str in members(field.annotation):
                yield section, name


def test_every_text_key_of_a_recipe_names_a_file_by_its_type_or_is_known_to_name_none():
    unknown = []
    for section, name in text_keys():
        is_model = issubclass(section, NamedModel) and name == section.model_key
        if not is_model and not {name, f"{section.__name__}.{name}"} & set(NAMES_NO_FILE):
            unknown.append(f"{section.__module__}.{section.__name__}.{name}")
    assert unknown == [], "give the key the type InputFile or TemplateFile, or say here what it names"


def test_the_keys_that_name_files_are_found_in_the_schema():
    keys = set()
    for section in sections():
        for name, field in section.model_fields.items():
            if any(isinstance(m, type) and issubclass(m, RecipeFile) for m in members(field.annotation)):
                keys.add(f"{section.__name__}.{name}")
    assert keys == {
        "AlpacaEvalConfig.annotators_config",
        "AlpacaEvalConfig.calibration",
        "AlpacaEvalConfig.reference_outputs",
        "AutoJSection.prompt_file",
        "DataConfig.path",
        "DataConfig.trees",
        "DpoConfig.reference_adapter",
        "Owners.judge",
        "PartConfig.path",
        "PolicyConfig.template",
        "SafeRlhfPrompts.dataset",
        "Tldr.posts",
        "PromptsConfig.path",
        "QuestionAnswersConfig.template",
        "QuestionsConfig.path",
        "SelectorConfig.template",
    }


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working folder with a file of pairs and a template."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pairs.jsonl").write_text(PAIRS)
    (folder / "policy.txt").write_text(TEMPLATE)
    monkeypatch.chdir(folder)
    return folder


def own_recipe(*overrides):
    """The recipe `debug` on the files of the working folder."""
    return load_recipe(
        "debug",
        [
            "data={source: jsonl, path: pairs.jsonl, partition: iid, clients: 4}",
            "policy.template=policy.txt",
            *overrides,
        ],
    )


def test_a_run_keeps_the_bytes_of_its_files_when_they_are_changed_or_deleted(files, tmp_path):
    run = create_run(own_recipe(), tmp_path / "run")
    before = run.recipe().fingerprint("data", "policy")
    (files / "pairs.jsonl").unlink()
    (files / "policy.txt").write_text("Translate: {prompt}\n")
    recipe = run.recipe()
    assert open(recipe.data.path).read() == PAIRS
    assert load_template(recipe.policy.template, "policy").render(prompt="P") == "Question: P\nAnswer:"
    assert recipe.fingerprint("data", "policy") == before


def test_a_run_reads_its_files_wherever_its_folder_and_the_process_are(files, tmp_path, monkeypatch):
    create_run(own_recipe(), tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    recipe = Run("moved", tmp_path / "moved").recipe()
    assert open(recipe.data.path).read() == PAIRS
    assert str(tmp_path) not in (tmp_path / "moved" / "recipe.yaml").read_text()


def test_an_error_about_a_copy_names_the_file_as_its_author_wrote_it(files, tmp_path):
    recipe = create_run(own_recipe(), tmp_path / "run").recipe()
    with (
        pytest.raises(DataError, match=r"^pairs.jsonl, row 1: column 'group' is missing$"),
        original_names(recipe),
    ):
        raise DataError(f"{recipe.data.path.copy}, row 1: column 'group' is missing")


def test_two_files_with_the_same_bytes_have_a_copy_each(files, tmp_path):
    (files / "other.jsonl").write_text(PAIRS)
    recipe = create_run(own_recipe("data.trees=other.jsonl"), tmp_path / "run").recipe()
    assert open(recipe.data.trees).read() == open(recipe.data.path).read() == PAIRS
    assert recipe.data.trees.copy != recipe.data.path.copy


def test_a_folder_that_contains_the_run_is_refused(files, tmp_path):
    with pytest.raises(RecipeError, match=r"data.trees: the folder .* contains the run"):
        create_run(own_recipe("data.trees=."), files / "runs" / "run")


def test_linked_folders_are_copied_and_counted(files, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl").write_text("{}")
    (files / "trees").mkdir()
    (files / "trees" / "linked").symlink_to(tmp_path / "shards")
    (tmp_path / "shards" / "again").symlink_to(files / "trees")  # a circle
    run = create_run(own_recipe("data.trees=trees"), tmp_path / "run")
    assert [path.name for path in run.inputs.rglob("*.jsonl")].count("a.jsonl") == 1


def test_a_copy_that_was_edited_is_refused(files, tmp_path):
    run = create_run(own_recipe(), tmp_path / "run")
    verify_inputs(run.recipe())
    next(run.inputs.rglob("pairs.jsonl")).write_text("changed")
    with pytest.raises(RecipeError, match=r"data.path: the run's own copy .* has changed"):
        verify_inputs(run.recipe())


def test_a_run_of_an_earlier_version_without_the_texts_of_its_templates_is_refused():
    with pytest.raises(RecipeError, match=r"template: the run was started by an earlier version"):
        verify_inputs(load_recipe("debug"))


def test_a_local_model_is_found_where_a_project_has_moved_to(model_folder, tmp_path):
    run = create_run(own_recipe("policy.backbone.name=model"), model_folder.parent / "runs" / "run")
    before = run.recipe().fingerprint("policy")
    model_folder.parent.rename(tmp_path / "moved")
    recipe = Run("run", tmp_path / "moved" / "runs" / "run").recipe()
    verify_inputs(recipe)
    assert recipe.policy.backbone.location == str(tmp_path / "moved" / "model")
    assert recipe.fingerprint("policy") == before


@pytest.mark.parametrize("name", ["pairs.jsonl", "policy.txt"])
def test_the_fingerprint_follows_the_bytes_of_a_file(files, tmp_path, name):
    first = create_run(own_recipe(), tmp_path / "1").recipe().fingerprint("data", "policy")
    assert create_run(own_recipe(), tmp_path / "2").recipe().fingerprint("data", "policy") == first
    path = files / name
    path.write_text(path.read_text().replace("Question", "Query").replace('"c"', '"x"'))
    assert create_run(own_recipe(), tmp_path / "3").recipe().fingerprint("data", "policy") != first


def test_the_text_of_every_template_is_part_of_a_runs_recipe(tmp_path):
    recipe = create_run(load_recipe("debug"), tmp_path / "run").recipe()
    templates = [named for _, named in named_files(recipe) if isinstance(named, TemplateFile)]
    assert len(templates) == 3  # of the selector, the policy, and the selector that judges
    for template in templates:
        kind = "selector" if "selector" in template.name else "policy"
        assert load_template(template, kind) == load_template(template.name, kind)
    judge = recipe.evaluation.judge.model_dump(mode="json")
    assert judge["selector"]["template"]["text"] == recipe.selector.template.text, "the key of a cached judge"


def test_flipped_labels_change_what_dvc_compares(files, tmp_path):
    def stage_inputs():
        write_stage_inputs(own_recipe(), tmp_path / "pipeline")
        return yaml.safe_load((tmp_path / "pipeline" / "recipe.yaml").read_text())["data"]

    before = stage_inputs()
    assert stage_inputs() == before
    (files / "pairs.jsonl").write_text(PAIRS.replace('"c"', '"x"'))
    assert stage_inputs() != before


def test_a_folder_is_copied_without_hidden_files_and_counts_by_names_and_bytes(files, tmp_path):
    folder = files / "trees"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    (folder / "deep" / "csqa.jsonl").write_text("{}")
    recipe = own_recipe("data.trees=trees")
    copied = create_run(recipe, tmp_path / "1").recipe().data.trees
    names = [path.name for path in (tmp_path / "1" / "inputs").rglob("*") if path.is_file()]
    assert sorted(names) == ["csqa.jsonl", "pairs.jsonl"]
    (folder / "deep" / "csqa.jsonl").rename(folder / "deep" / "cose.jsonl")
    assert create_run(recipe, tmp_path / "2").recipe().data.trees != copied


def test_the_runs_of_a_benchmark_read_a_file_once_and_share_its_copy(files, tmp_path):
    known = {}
    first = create_run(own_recipe(), tmp_path / "1", known=known)
    (files / "pairs.jsonl").write_text("changed while the arms are written")
    second = create_run(own_recipe(), tmp_path / "2", known=known)
    one, other = (next(run.inputs.rglob("pairs.jsonl")) for run in (first, second))
    assert one.samefile(other)
    assert second.recipe().data == first.recipe().data


@pytest.mark.parametrize("command", [["check"], ["run"]])
def test_a_missing_file_is_refused_before_anything_is_written(files, tmp_path, monkeypatch, command):
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "runs"))
    error = refusal(*command, "debug", "data={source: jsonl, path: pear.jsonl, partition: iid, clients: 4}")
    assert "data.path: there is no file or folder 'pear.jsonl'" in error
    assert str(files) in error
    assert not (tmp_path / "runs").exists()


def test_a_hash_of_other_bytes_in_a_recipe_is_refused(files, tmp_path):
    recipe = own_recipe(f"data.path={{name: pairs.jsonl, sha256: {'a' * 64}}}")
    with pytest.raises(
        RecipeError, match=r"data.path: the content of .*pairs.jsonl is not that of the sha256"
    ):
        create_run(recipe, tmp_path / "run")


def test_a_copy_that_was_deleted_is_missing_and_not_replaced_by_the_original(files, tmp_path):
    run = create_run(own_recipe(), tmp_path / "run")
    next(run.inputs.rglob("pairs.jsonl")).unlink()
    with pytest.raises(FileNotFoundError):
        open(run.recipe().data.path)


def test_the_annotator_of_the_package_is_a_name_and_a_local_one_is_copied(files, tmp_path):
    (files / "mine").mkdir()
    (files / "mine" / "configs.yaml").write_text("{}")
    for name, digest in (("weighted_alpaca_eval_gpt4_turbo_new", type(None)), ("mine", str)):
        recipe = own_recipe(f"evaluation.alpaca_eval={{annotators_config: {name}}}")
        stored = create_run(recipe, tmp_path / name).recipe().evaluation.alpaca_eval.annotators_config
        assert isinstance(stored.sha256, digest)


@pytest.fixture
def model_folder(files):
    """A local folder of a model."""
    return Path(shutil.copytree(fetch_backbone("tiny-random"), files / "model"))


def test_a_local_model_is_known_by_its_hash_and_not_copied(model_folder, tmp_path):
    recipe = create_run(own_recipe("policy.backbone.name=model"), tmp_path / "run").recipe()
    assert recipe.policy.backbone.name == "model"
    assert recipe.policy.backbone.location == str(model_folder)
    assert recipe.policy.backbone.sha256 is not None
    assert recipe.selector.backbone.sha256 is None
    assert not list((tmp_path / "run" / "inputs").rglob("config.json"))
    verify_inputs(recipe)


def test_a_run_does_not_resume_with_a_local_model_that_has_changed(model_folder, tmp_path):
    recipe = create_run(own_recipe("policy.backbone.name=model"), tmp_path / "run").recipe()
    (model_folder / "config.json").write_text("{}")
    with pytest.raises(
        RecipeError, match=r"policy.backbone.name: the files of the folder .*model are not those"
    ):
        verify_inputs(recipe)
    shutil.rmtree(model_folder)
    with pytest.raises(RecipeError, match=r"policy.backbone.name: there is no file or folder"):
        verify_inputs(recipe)


def test_a_model_at_an_endpoint_is_a_name_even_where_a_folder_has_it(model_folder, tmp_path):
    judge = "evaluation.judge={kind: autoj, model: model, base_url: 'http://127.0.0.1:8000/v1'}"
    recipe = create_run(own_recipe(judge), tmp_path / "run").recipe()
    assert recipe.evaluation.judge.model == "model"
    assert recipe.evaluation.judge.sha256 is None


HUB_MODELS = [
    "policy.backbone.name=org/name",
    "federation.options={objective: ppo}",
    "federation.method=feddpo",
    "rewards={own: {kind: trained, template: '{prompt} {response}', training: {backbone: {name: org/name}}}}",
    "evaluation.judge={kind: selector, selector: {backbone: {name: org/name}}}",
]


@pytest.fixture
def move_main(tmp_path, monkeypatch):
    """A function that lets `main` of org/name be another commit in a cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "cache" / "models--org--name"
    (root / "refs").mkdir(parents=True)

    def move(commit):
        if not (root / "snapshots" / commit).is_dir():
            shutil.copytree(fetch_backbone("tiny-random"), root / "snapshots" / commit)
        (root / "refs" / "main").write_text(commit)

    return move


def revisions(recipe):
    """The revisions of the models of the hub."""
    named = [named for _, named in named_files(recipe) if isinstance(named, NamedModel)]
    return {one.revision for one in named if one.model_name == "org/name"}


def test_all_models_of_a_run_are_read_at_the_commits_of_its_start_after_the_hub_has_others(
    files, tmp_path, move_main
):
    first, second = "a" * 40, "b" * 40
    move_main(first)
    recipe = own_recipe(*HUB_MODELS)
    run = create_run(recipe, tmp_path / "run")
    assert revisions(run.recipe()) == {first}
    move_main(second)
    run.pin_models()
    assert revisions(run.recipe()) == {first}
    assert revisions(Run("run", run.folder).recipe()) == {first}
    stored = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    assert stored["policy"]["backbone"]["revision"] is None, "as its author wrote it"
    later = create_run(recipe, tmp_path / "later").recipe()
    assert revisions(later) == {second}
    assert later.fingerprint("policy") != run.recipe().fingerprint("policy")


def test_a_commit_that_nothing_told_at_the_start_is_recorded_when_the_run_goes_on(files, tmp_path, move_main):
    run = create_run(own_recipe(HUB_MODELS[-1]), tmp_path / "run")
    assert revisions(run.recipe()) == {None}
    move_main("a" * 40)
    run.pin_models()
    assert revisions(run.recipe()) == {"a" * 40}


def test_dvc_compares_the_commits_of_models_of_the_hub(files, tmp_path, move_main):
    folder = tmp_path / "pipeline"

    def stage_inputs():
        shutil.rmtree(folder / "inputs", ignore_errors=True)  # as DVC does before it repeats the stage
        write_stage_inputs(own_recipe(*HUB_MODELS), folder)
        recipe, rounds = (
            yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("recipe", "federate-inputs")
        )
        return [recipe["policy"], recipe["evaluation"], rounds["policy"], rounds["rewards"]]

    move_main("a" * 40)
    before = stage_inputs()
    assert stage_inputs() == before
    move_main("b" * 40)
    for new, old in zip(stage_inputs(), before, strict=True):
        assert new != old


@pytest.mark.parametrize("value", ["5", "[pairs.jsonl]", "{path: pairs.jsonl}", "''"])
def test_a_value_that_is_no_name_of_a_file_is_refused_with_its_key(files, value):
    with pytest.raises(RecipeError, match=r"key 'data.path'.*should be the name of a file"):
        own_recipe(f"data.path={value}")


def test_a_file_without_content_is_written_as_its_name():
    assert InputFile("pairs.jsonl").dump() == "pairs.jsonl"
    assert load_recipe("debug").model_dump(mode="json")["policy"]["template"] == "summarization/policy"
