"""The comparison with other libraries: what is exchanged, TRL's program on the tiny model, and errors."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from components.config import UserError
from components.paths import PACKAGE
from perf import commands
from perf.__main__ import main
from perf.peers import comparisons, exchange, own
from perf.peers.comparisons import OURS, loss_difference


@pytest.fixture(scope="module")
def selector_folder(tmp_path_factory, prepared):
    """The exchange folder of two rounds of FedBis with the tiny selector."""
    folder = tmp_path_factory.mktemp("selector")
    shutil.copytree(prepared, exchange.prepared_folder(folder))
    exchange.write_exchange(exchange.load_peer_recipe("debug", ["federation.rounds=2"]), folder)
    return folder


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory, prepared):
    """The exchange folder of two clients of FedDPO with the tiny policy."""
    folder = tmp_path_factory.mktemp("policy")
    shutil.copytree(prepared, exchange.prepared_folder(folder))
    recipe = exchange.load_peer_recipe("debug", [*comparisons.FEDDPO, "federation.rounds=1"])
    exchange.write_exchange(recipe, folder, clients=2)
    return folder


def read(folder):
    return json.loads((folder / "exchange.json").read_text(encoding="utf-8"))


def read_pins(path):
    return dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)$", path.read_text(), re.MULTILINE))


def test_the_exchange_of_a_selector_has_labeled_rows_and_minibatches(selector_folder):
    content = read(selector_folder)
    assert content["model"]["layers"] == 2
    assert len(content["model"]["choices"]) == 2
    assert content["model"]["lora"] == {
        "r": 2,
        "lora_alpha": 4.0,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
    }
    assert content["beta"] is None
    assert [len(jobs) for jobs in content["rounds"]] == [2, 2]
    for jobs in content["rounds"]:
        for job in jobs:
            client = content["clients"][job["client"]]
            assert [len(indices) for indices in job["minibatches"]] == [4, 4]
            assert max(map(max, job["minibatches"])) < len(client["rows"])
            assert len(client["labels"]) == len(client["rows"])
            assert set(client["labels"]) == {0, 1}


def test_the_exchange_of_a_policy_has_pairs_of_tokens_and_an_adapter_that_fits_peft(policy_folder):
    content = read(policy_folder)
    (jobs,) = content["rounds"]
    assert content["beta"] == pytest.approx(0.1)
    assert content["model"]["choices"] == []
    assert sorted(content["clients"]) == sorted(job["client"] for job in jobs)
    assert [len(indices) for indices in jobs[0]["minibatches"]] == [1, 1]
    rows = content["clients"][jobs[0]["client"]]["rows"]
    assert {len(row) for row in rows} == {3}
    assert all(isinstance(token, int) for row in rows for ids in row for token in ids)
    from safetensors.torch import load_file

    adapter = load_file(policy_folder / "adapter.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in adapter)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapter)
    assert all(tensor.any() for tensor in adapter.values())


def test_a_trainer_of_trl_has_the_losses_of_the_project(policy_folder):
    from perf.peers.scripts import trl_client

    content = read(policy_folder)
    peers = [trl_client.train_client(policy_folder, content, job) for job in content["rounds"][0]]
    ours = own.time_clients(policy_folder)
    assert loss_difference("trl", ours, peers) < 1e-5
    for part, other in zip(ours, peers, strict=True):
        assert part["losses"].keys() == other["losses"].keys()
        for client, losses in part["losses"].items():
            assert losses[1] == pytest.approx(other["losses"][client][1], abs=1e-4)
    assert all(part["seconds"] > 0 for part in [*ours, *peers])


@pytest.mark.long
def test_rounds_through_the_flow_have_the_losses_of_clients_one_after_the_other(
    selector_folder, new_workplace, monkeypatch
):
    place = new_workplace("peers")
    rounds, _ = place.call(lambda: own.time_rounds(str(selector_folder)))
    assert len(rounds) == 2
    assert all(part["seconds"] > 0 for part in rounds)
    clients = own.time_clients(str(selector_folder))
    losses = {name: losses for part in clients for name, losses in part["losses"].items()}
    assert rounds[0]["losses"].keys() == losses.keys()
    for name, expected in losses.items():
        assert rounds[0]["losses"][name] == pytest.approx(expected, abs=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed here")
@pytest.mark.parametrize("tuned", [False, True])
def test_a_client_of_the_flower_app_has_the_losses_of_the_project(selector_folder, tuned):
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    from perf.peers.scripts import flower_app

    content = read(selector_folder)
    model = flower_app.load_model(str(selector_folder))
    for job, part in zip(content["rounds"][0], own.time_clients(selector_folder), strict=True):
        set_peft_model_state_dict(model, load_file(selector_folder / "adapter.safetensors"))
        losses = flower_app.train_locally(model, content, job, tuned)
        assert losses[0] == pytest.approx(part["losses"][job["client"]][0], abs=1e-5)


@pytest.mark.parametrize("script", sorted(comparisons.SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_programs_of_the_peers_import_nothing_of_the_project(script):
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    packages = {"components", "fed_rlhf", "tasks", "flows", "infra", "perf", "tests"}
    assert not packages & {name.split(".")[0] for name in imported}


def test_the_peers_have_the_versions_of_the_project():
    pins = read_pins(comparisons.REQUIREMENTS)
    versions = read_pins(PACKAGE / "constraints.txt")
    assert {"torch", "transformers", "peft", "trl", "flwr"} <= set(pins)
    assert {name for name in pins if name not in versions} == {"flwr"}
    assert {name: versions[name] for name in pins if name != "flwr"} == {
        name: version for name, version in pins.items() if name != "flwr"
    }


def test_the_environment_is_made_once_for_the_same_requirements(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        (tmp_path / "peers").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(comparisons, "subprocess", SimpleNamespace(run=run))
    for _ in range(2):
        assert comparisons.peers_python(tmp_path / "peers") == tmp_path / "peers" / "bin" / "python"
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    (tmp_path / "peers" / "installed.txt").write_text("flwr==1.0.0")
    comparisons.peers_python(tmp_path / "peers")
    assert len(commands) == 4


def test_a_failed_installation_is_one_sentence_and_leaves_no_stamp(tmp_path, monkeypatch):
    def run(command, **_):
        failed = "pip" in command
        errors = "WARNING: Retrying\nERROR: No matching distribution found for flwr==1.41.0\nmore"
        return subprocess.CompletedProcess(command, int(failed), "", errors if failed else "")

    monkeypatch.setattr(comparisons, "subprocess", SimpleNamespace(run=run))
    with pytest.raises(UserError, match="No matching distribution found for flwr.*check that PyPI") as caught:
        comparisons.peers_python(tmp_path / "peers")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "peers" / "installed.txt").exists()


def test_peers_run_without_telemetry_and_do_not_see_the_project(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    variables = comparisons.peer_variables()
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"
    assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
    assert variables["PYTHONPATH"] == str(comparisons.SCRIPTS)


def work_of(seconds, loss=0.7):
    return {"seconds": seconds, "losses": {"ada": [loss, 0.6]}}


def test_runs_alternate_and_the_first_work_of_a_run_is_not_timed():
    order = []
    seconds = {OURS: [9.0, 2.0, 2.0], "flower": [9.0, 6.0, 4.0]}

    def program(name):
        order.append(name)
        return [work_of(value, 0.7 if name == OURS else 0.7005) for value in seconds[name]]

    frame = comparisons.alternate({name: lambda name=name: program(name) for name in seconds}, 2)
    assert order == [OURS, "flower", "flower", OURS]
    assert frame["seconds"].tolist() == [2.0, 5.0, 5.0, 2.0]
    assert frame["loss difference, first steps"].tolist() == pytest.approx([0, 0.0005, 0.0005, 0])


def test_a_peer_that_does_other_work_in_a_repeat_is_an_error():
    losses = iter([0.7, 0.8])
    programs = {
        OURS: lambda: [work_of(1.0), work_of(1.0)],
        "trl": lambda: [work_of(1.0), work_of(1.0, next(losses))],
    }
    with pytest.raises(AssertionError, match="trl must do the work of fed-rlhf"):
        comparisons.alternate(programs, 2)


@pytest.mark.parametrize("peer", [{"ada": (0.702, 0.6)}, {"ada": (float("nan"), 0.6)}, {"bea": (0.7, 0.6)}])
def test_other_work_of_a_peer_is_an_error(peer):
    ours = [{"seconds": 1.0, "losses": {"ada": (0.7, 0.6)}}]
    same = [{"seconds": 2.0, "losses": {"ada": (0.7005, 0.9)}}]
    assert loss_difference("trl", ours, same) == pytest.approx(0.0005)
    with pytest.raises(AssertionError, match="trl must"):
        loss_difference("trl", ours, [{"seconds": 2.0, "losses": peer}])


def test_a_recipe_with_an_optimizer_that_peers_do_not_have_is_refused(monkeypatch, capsys, tmp_path):
    from components.recipes import load_recipe
    from components.recipes.load import dump_recipe

    path = tmp_path / "sgd.yaml"
    path.write_text(dump_recipe(load_recipe("debug", ["federation.optimizer.name=sgd"])))
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--beside-others", "--recipe", str(path)])
    assert "expected adamw with a constant scheduler" in capsys.readouterr().err


def test_a_recipe_of_another_method_or_more_clients_than_cores_are_refused_for_flower(monkeypatch):
    with pytest.raises(UserError, match="federation.method of the recipe 'reasoning/demo' is 'drift'"):
        comparisons.compare_flower("reasoning/demo", 1)
    monkeypatch.setattr(comparisons, "available_cores", lambda: 2)
    with pytest.raises(UserError, match="3 clients cannot train at once on 2 cores"):
        comparisons.compare_flower("debug", 1, clients_at_once=3)


def test_one_client_at_a_time_is_measured_beside_two(monkeypatch, tmp_path):
    measured = []

    def compare(*arguments):
        measured.append(arguments)
        return {f"peers/{len(measured)}": [float(len(measured))]}

    monkeypatch.setattr(commands, "compare_flower", compare)
    monkeypatch.setattr(commands, "compare_trl", compare)
    path = tmp_path / "speed.jsonl"
    with pytest.raises(SystemExit, match="0"):
        main(["peers", "--beside-others", "--recipe", "debug", "--pairs", "2", "--record", str(path)])
    assert measured == [("debug", 2, 1, 1), ("debug", 2, 1, 2), ("debug", 2)]
    line = json.loads(path.read_text())
    assert line["ratios"] == {"peers/1": [1.0], "peers/2": [2.0], "peers/3": [3.0]}


def test_no_peers_are_measured_beside_other_work(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (1.4, 0.0, 0.0))
    with pytest.raises(SystemExit, match="2"):
        main(["peers"])
    assert "load average is 1.40" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--pairs", "--clients-at-once"])
def test_no_repetitions_are_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["peers", option, "0"])
    assert option in capsys.readouterr().err
