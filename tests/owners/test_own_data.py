"""Owners that keep their rows: what they publish and answer, and a server that can read none of them."""

import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from components.config import Recipe, RecipeError, UserError
from components.config.privacy import LabelPrivacy
from components.data.prepare import assemble
from components.data.records import OWNERS, DataError, pairs_digest, read_clients, read_pairs
from components.federation.clients.context import ClientContexts
from components.federation.protocol import MeasureJob
from components.models.store import AdapterStore
from components.owners.codec import CodecError, OwnerRequest, decode
from components.owners.home import OwnerConfig, create_home, find_owner, read_config, sockets_root
from components.owners.host import peer_user
from components.owners.jobs import ForgetJob, PublishJob, Receipt, Statement, prompt_hash
from components.owners.process import check_recipe, check_request
from components.owners.publish import OVERLAP, publish
from components.owners.requests import Requests
from components.owners.run_folder import OwnerRunFolder
from components.owners.sent_log import read_log
from components.owners.statements import check_statements, read_server_data, write_prepared
from components.recipes import load_recipe
from components.recipes.inputs import store_inputs
from flows.cli import app
from tasks.owner_processes import JobFailed, ask_owner
from tests.owners.test_processes import private_part, server_part
from tests.support.bare_loop import run_bare_loop
from tests.support.crashes import folder_content
from tests.support.separate_owners import separate_owners, without_rows
from tests.support.variants import SMALL, VARIANTS

NAMES = ("north", "south", "east")
CENTRAL = "data.clients=null"
CLIENTS = ("ada", "bea", "cyd", "dan")


def write_rows(path, owner, pairs=20, **changed):
    rows = [
        {
            "prompt": f"{owner} asks {n}",
            "chosen": f"a long answer to {n}" if n % 2 else f"yes {n}",
            "rejected": f"no {n}" if n % 2 else f"another answer, {n}",
        }
        for n in range(pairs)
    ]
    rows[0] |= changed
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prompts(path, *texts):
    rows = [{"instruction": text, "output": "an answer", "generator": "a person"} for text in texts]
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def recipe(tmp_path):
    """A recipe with three owners."""
    return load_recipe("debug", overrides(tmp_path))


def overrides(folder, *further, owners=NAMES):
    judge = write_rows(folder / "judge.jsonl", "judge", 40)
    align = write_prompts(folder / "align.json", *(f"align {n}" for n in range(6)))
    held_out = write_prompts(folder / "held-out.json", *(f"held out {n}" for n in range(6)))
    data = {
        "source": "owners",
        "options": {"owners": list(owners), "judge": str(judge)},
        "align_prompts": {"source": "alpaca_eval", "path": str(align)},
        "test_prompts": {"source": "alpaca_eval", "path": str(held_out)},
    }
    return [f"data={json.dumps(data)}", "runtime.transport=processes", *further]


@pytest.fixture
def owner(tmp_path):
    """Makes the home of an owner."""

    def make(name, **changed):
        data = write_rows(tmp_path / f"{name}.jsonl", name, **changed)
        create_home(tmp_path / name, OwnerConfig(name=name, data=str(data), sockets=str(tmp_path)))
        return tmp_path / name

    return make


def publish_of(home, recipe, prompts=()):
    folder = home / "runs" / "run" / "prepared"
    return publish(home, read_config(home), recipe, folder, [prompt_hash(text) for text in prompts]), folder


def test_an_owner_prepares_the_rows_that_a_central_preparation_would_give_it(owner, recipe, tmp_path):
    homes = {name: owner(name) for name in NAMES}
    together = tmp_path / "together.jsonl"
    lines = []
    for name in NAMES:
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            lines.append(json.dumps(json.loads(line) | {"client_id": name}))
    together.write_text("\n".join(lines))
    options = "data.options={align_share: 0.0, judge_clients: 0.0}"
    central = load_recipe("debug", ["data.source=jsonl", f"data.path={together}", options, CENTRAL])
    expected = assemble(central.data, central.seed).tables["pairs"]
    for name, home in homes.items():
        statement, folder = publish_of(home, recipe)
        own = read_pairs(folder / "pairs.parquet")
        assert [pair.pair_id for pair in own] == list(expected[expected["client_id"] == name]["pair_id"])
        assert [pair.split for pair in own] == list(expected[expected["client_id"] == name]["split"])
        assert statement.counts.rows() == read_clients(folder)[name]


def test_pairs_with_a_prompt_of_the_servers_are_left_out_at_the_owner(owner, recipe):
    home = owner("north")
    statement, folder = publish_of(home, recipe, ["  NORTH asks 3", "something else"])
    assert statement.left_out == {OVERLAP: 1}
    assert "north asks 3" not in {pair.prompt for pair in read_pairs(folder / "pairs.parquet")}


def test_a_statement_has_numbers_and_no_text_of_a_row(owner, recipe):
    home = owner("north", prompt="a secret <eos>", chosen="same", rejected="same", domain="a secret")
    statement, folder = publish_of(home, recipe)
    assert {pair.domain for pair in read_pairs(folder / "pairs.parquet")} == {""}
    text = statement.model_dump_json()
    assert "secret" not in text and "asks" not in text and "same text: 1" in text
    assert statement.repeats.equal == 1 and statement.control_tokens == 1


def test_with_protected_verdicts_a_statement_does_not_depend_on_them(owner, recipe, tmp_path):
    """Neither the share of longer chosen completions, nor which of the two is empty, nor what repeats."""
    protected = with_privacy(recipe, epsilon=2)
    rows = [
        {"prompt": f"asks {n}", "chosen": f"a long answer {n}", "rejected": f"no {n}"} for n in range(200)
    ]
    rows += [rows[0], rows[1], dict(rows[2], chosen=rows[2]["rejected"], rejected=rows[2]["chosen"])]
    exchanged = [dict(row, chosen=row["rejected"], rejected=row["chosen"]) for row in rows]
    statements = {}
    for name, own in (("north", rows), ("south", [*exchanged[:60], *rows[60:]])):
        home = owner(name)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        plain, _ = publish_of(home, recipe)
        statement, _ = publish_of(home, protected)
        statements[name] = statement.model_dump(exclude={"digest"})
        assert statement.repeats is None and plain.repeats.duplicates
        assert any("longer" in one.expectation for one in plain.expectations)
        assert not any("label balance" in one.expectation for one in statement.expectations)
        assert {one.column for one in statement.expectations}.isdisjoint({"chosen", "rejected"})
    assert statements["north"] == statements["south"]


def with_privacy(recipe, **privacy):
    federation = recipe.federation.model_copy(update={"privacy": LabelPrivacy(**privacy)})
    return recipe.model_copy(update={"federation": federation})


def test_an_owner_takes_part_within_its_own_epsilon(recipe, tmp_path):
    stored = store_inputs(recipe, tmp_path / "inputs").model_dump(mode="json")
    recipe = Recipe.model_validate(stored)
    config = OwnerConfig(name="north", data="x", sockets="s", max_epsilon=1.5)
    check_recipe(with_privacy(recipe, epsilon=1.5), config)
    for other in (recipe, with_privacy(recipe, epsilon=2)):
        with pytest.raises(CodecError, match=r"epsilon of at most 1\.5"):
            check_recipe(other, config)
    for key in ("simulated", "exact_measures"):
        with pytest.raises(RecipeError, match=f"federation.privacy.{key} would give the verdicts of owners"):
            check_recipe(with_privacy(recipe, epsilon=1, **{key: True}), config)


def test_an_expectation_that_fails_at_an_owner_quotes_no_row(owner, recipe, caplog):
    home = owner("north", chosen="a secret", rejected="a secret")
    strict = recipe.data.model_copy(update={"max_equal": 0.0})
    statement, folder = publish_of(home, recipe.model_copy(update={"data": strict}))
    assert "    pair_id: " in caplog.text
    assert "secret" not in caplog.text
    assert "secret" not in statement.model_dump_json()
    assert not folder.exists()
    with pytest.raises(DataError, match=r"owner north do not meet 'chosen differs.*' \(1 rows\)"):
        check_statements({"north": statement})


def test_a_digest_changes_with_the_rows_and_with_the_salt(owner, recipe, tmp_path):
    home = owner("north")
    first = publish_of(home, recipe)[0].digest
    assert publish_of(home, recipe)[0].digest == first
    (home / "salt").write_bytes(b"another")
    assert publish_of(home, recipe)[0].digest != first


def test_owners_of_another_version_of_the_rounds_are_refused(owner, recipe):
    statement, _ = publish_of(owner("north"), recipe)
    with pytest.raises(DataError, match="owner north computes rounds of version 1"):
        check_statements({"north": statement.model_copy(update={"rounds_version": 1})})


def test_the_servers_folder_has_counts_prompts_and_judge_and_no_row(owner, recipe, tmp_path):
    statements = {name: publish_of(owner(name), recipe)[0] for name in NAMES}
    folder = tmp_path / "prepared"
    report = write_prepared(read_server_data(recipe), statements, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "clients.json", "judge.parquet", OWNERS, "prompts.parquet", "report.json",
    ]  # fmt: skip
    assert report.rows.pairs == 60 and report.partition.clients == 3 and report.rows.judge == 40
    assert not any(b"north asks" in path.read_bytes() for path in folder.iterdir())
    changed = dict(statements, north=statements["north"].model_copy(update={"digest": "0" * 64}))
    before = pairs_digest(folder)
    write_prepared(read_server_data(recipe), changed, folder)
    assert pairs_digest(folder) != before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["runtime.transport=prefect"], "needs runtime.transport 'processes'"),
        (["data.path=rows.jsonl"], "data.path is not used with data.source 'owners'"),
        (["data.unseen_clients=1"], "data.unseen_clients is not used"),
        (["data.partition=iid", "data.clients=3"], "data.partition would mix rows of owners"),
        (["data.test_prompts=null"], "data.test_prompts is missing"),
        (["data.align_prompts=null"], "data.align_prompts is missing"),
        (["data.options.owners=[north, north]"], "'north' is named twice"),
        (["data.options.judge=null"], "data.options.judge is missing: evaluation.judge is trained on pairs"),
        (["federation.method=few_shot"], "'few_shot' puts pairs of clients into prompts"),
        (["federation.clients_per_round=4"], "but data.options.owners names 3: use at most 3"),
    ],
)
def test_settings_that_need_rows_are_refused(tmp_path, changed, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("debug", overrides(tmp_path, *changed))


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_an_owner_is_made_and_checked_by_commands(tmp_path, recipe):
    rows = write_rows(tmp_path / "rows.jsonl", "north")
    home = tmp_path / "homes" / "north"
    made = call("owner", "init", "north", "--data", rows, "--home", home, "--sockets", tmp_path / "s")
    assert made.exit_code == 0, made.output
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}
    again = call("owner", "init", "north", "--data", rows, "--home", home)
    assert again.exit_code == 2 and "is there already, and not empty" in again.output
    misspelt = call(
        "owner", "init", "n", "--data", rows, "--home", tmp_path / "n", "--column", "promt=question"
    )
    assert misspelt.exit_code == 2 and "prompt" in misspelt.output
    checked = call("owner", "check", home, "debug", *overrides(tmp_path))
    assert checked.exit_code == 0, checked.output
    assert Statement.model_validate_json(checked.stdout).counts.train > 0
    assert not (home / "runs").exists()
    listed = call("owners", "--sockets", tmp_path / "s")
    assert "no owner has ever been started" in listed.output


def test_files_and_folders_that_are_no_owners_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="is no home of an owner"):
        read_config(tmp_path)
    (tmp_path / "owner.yaml").write_text(yaml.safe_dump({"name": "north", "data": "x.jsonl", "sockets": 3}))
    with pytest.raises(UserError, match="owner.yaml: sockets"):
        read_config(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    made = call("owner", "init", "north", "--data", tmp_path / "notes.txt", "--home", tmp_path / "north")
    assert made.exit_code == 2 and "is no file of pairs" in made.output
    with pytest.raises(UserError, match="a Unix socket's path has at most 107"):
        create_home(tmp_path / "h", OwnerConfig(name="n", data="x", sockets="/" + "x" * 120))


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    """Owners ada, bea, cyd and dan, which run."""
    folder = tmp_path_factory.mktemp("owners")
    with separate_owners(folder) as owners:
        for name in CLIENTS:
            owners.add(name, write_rows(folder / f"{name}.jsonl", name))
        owners.start(*CLIENTS)
        yield owners


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_of_a_server_that_can_read_no_row_have_the_bytes_of_rounds_in_one_process(
    variant, owners, prepared, tmp_path
):
    recipe = [*SMALL, *VARIANTS[variant]]
    run_bare_loop(load_recipe("debug", recipe), prepared, tmp_path / "one")
    owners.give_rows(variant, prepared, CLIENTS)
    folder = tmp_path / "run"
    without_rows(prepared, folder / "prepared")
    module = [sys.executable, "-m", "tests.support.separate_owners"]
    own = overrides(tmp_path, owners=CLIENTS)
    done = owners.serve(*module, variant, str(folder), str(owners.sockets), *own, *recipe)
    output, _ = done.communicate()
    assert done.returncode == 0, output[-2000:]
    expected = folder_content(tmp_path / "one")
    assert server_part(folder_content(folder)) == server_part(expected)
    stores = {}
    for name in CLIENTS:
        stores |= private_part(folder_content(owners.homes / name / "runs" / variant))
    assert stores == private_part(expected)


@pytest.mark.long
def test_the_server_cannot_read_an_owners_home(owners):
    if not owners.apart:
        pytest.skip("only root can let the homes belong to another user")
    listed = owners.serve("ls", str(owners.homes / "ada"))
    output, _ = listed.communicate()
    assert listed.returncode and "Permission denied" in output


@pytest.fixture
def ask(owners, prepared, tmp_path):
    """Sends a job to an owner, of a recipe with some changes; its answer, or why there is none."""
    run = tmp_path / "run"
    without_rows(prepared, run / "prepared")
    store = AdapterStore(run / "exchange" / "owners" / "adapters")
    contexts = ClientContexts(store, run / "prepared" / "pairs.parquet", run / "federation")

    def send(job, to=None, digest=None, **sections):
        recipe = load_recipe("debug", overrides(tmp_path, owners=[*CLIENTS, "eve"]))
        recipe = store_inputs(recipe.model_copy(update=sections), run / "inputs")
        if digest is not None:
            (run / "prepared" / OWNERS).write_text(json.dumps({job.client: {"digest": digest}}))
        place = owners.sockets
        if to is not None:
            place = tmp_path / "other"
            place.mkdir(exist_ok=True)
            if not (place / f"{job.client}.sock").exists():
                (place / f"{job.client}.sock").symlink_to(owners.sockets / f"{to}.sock")
        return ask_owner(job, Requests(recipe, contexts, "asked"), contexts, place)

    def send_unstored(job, **sections):
        recipe = store_inputs(load_recipe("debug", overrides(tmp_path, owners=CLIENTS)), run / "inputs")
        recipe = recipe.model_copy(update=sections)
        return ask_owner(job, Requests(recipe, contexts, "asked"), contexts, owners.sockets)

    send.unstored = send_unstored
    return send


@pytest.fixture
def home_of_owner(owner):
    home = owner("north")
    return read_config(home), home, OwnerRunFolder(home / "runs" / "r")


@pytest.mark.long
def test_an_owner_publishes_and_forgets_a_run_and_logs_both(owners, ask):
    published = Statement.model_validate(ask(PublishJob(client="ada", seed=1)).output)
    folder = owners.homes / "ada" / "runs" / "asked"
    assert published.counts.rows() == read_clients(folder / "prepared")["ada"]
    request = decode((folder / "request.json").read_bytes())
    assert not request.files and not request.digests and request.positions == {"ada": 0}
    receipt = Receipt.model_validate(ask(ForgetJob(client="ada", seed=1)).output)
    assert receipt.files > 3 and not folder.exists()
    kinds = [message.kind for message in read_log(owners.homes / "ada")]
    assert kinds[-2:] == ["publish", "forget"]


@pytest.mark.long
def test_a_job_for_another_client_is_refused(ask):
    for job in (PublishJob(client="ada", seed=1), ForgetJob(client="ada", seed=1)):
        with pytest.raises(JobFailed, match="the job is for another owner than the one here"):
            ask(job, to="bea")


@pytest.mark.long
def test_an_owner_takes_part_in_no_recipe_that_names_others_or_quotes_its_pairs(ask, debug):
    job = PublishJob(client="ada", seed=1)
    with pytest.raises(JobFailed, match="the recipe does not name owner ada in data.options.owners"):
        ask(job, data=debug.data)
    few_shot = load_recipe("debug", ["federation.method=few_shot"]).federation
    with pytest.raises(JobFailed, match="'few_shot' puts pairs of clients into prompts"):
        ask(job, federation=few_shot)


@pytest.mark.long
def test_an_owner_reads_no_file_of_its_machine_that_a_recipe_names(ask, debug, tmp_path):
    (tmp_path / "secret.txt").write_text("{prompt}")
    policy = load_recipe("debug", [f"policy.template={tmp_path / 'secret.txt'}"]).policy
    with pytest.raises(JobFailed, match="policy.template names a file of the owner's machine"):
        ask.unstored(PublishJob(client="ada", seed=1), policy=policy)


@pytest.mark.long
def test_pairs_that_are_not_those_that_were_published_are_trained_on_in_no_job(ask):
    digest = Statement.model_validate(ask(PublishJob(client="ada", seed=1)).output).digest
    job = MeasureJob(client="ada", round=0, seed=1, adapters=(), split="test")
    with pytest.raises(JobFailed, match="not those that the owner has published for the run"):
        ask(job, digest="0" * 64)
    assert ask(job, digest=digest).client == "ada"


def test_a_request_cannot_bring_pairs(home_of_owner):
    config, home, folder = home_of_owner
    common = {"run": "r", "recipe": {}, "exchange": "federation", "jobs": ()}
    for changed in (
        {"pairs": "x.parquet", "files": {}},
        {"pairs": "prepared/pairs.parquet", "files": {"./prepared/pairs.parquet": "a" * 64}},
    ):
        with pytest.raises(CodecError, match="other pairs than those that the owner has prepared"):
            check_request(OwnerRequest(**common, **changed), config, home, folder)


def test_only_the_user_that_the_owner_names_is_answered(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        accepted = listener.accept()[0]
        with accepted:
            assert peer_user(accepted) == os.getuid()


@pytest.mark.long
def test_an_error_at_an_owner_does_not_quote_its_file(owners, ask):
    path = Path(read_config(owners.homes / "cyd").data)
    before = path.read_bytes()
    path.write_bytes(b'{"prompt": "a secret"}\n')
    try:
        with pytest.raises(JobFailed, match=r"^DataError \(errors/\w+.txt of its private store\)$"):
            ask(PublishJob(client="cyd", seed=1))
    finally:
        path.write_bytes(before)


@pytest.mark.long
def test_an_owner_that_is_away_fails_at_once_with_since_when_and_joins_again(owners, ask):
    ask(PublishJob(client="dan", seed=1))
    owners.stop("dan")
    assert find_owner(owners.sockets, "dan").state == "away"
    with pytest.raises(JobFailed, match=r"^it is away since 20\S+ \S+, last publish$"):
        ask(PublishJob(client="dan", seed=1))
    with pytest.raises(JobFailed, match="it was never started here"):
        ask(PublishJob(client="eve", seed=1))
    owners.start("dan")
    assert ask(PublishJob(client="dan", seed=1)).client == "dan"


@pytest.mark.long
def test_a_killed_owner_takes_its_process_with_it_and_leaves_room_for_the_next(owners, ask):
    ask(PublishJob(client="bea", seed=1))
    host = owners.processes["bea"]
    (child,) = psutil.Process(host.pid).children()
    host.send_signal(signal.SIGKILL)
    host.wait()
    psutil.wait_procs([child], timeout=30)
    assert find_owner(owners.sockets, "bea").state == "away"
    owners.start("bea")
    assert ask(PublishJob(client="bea", seed=1)).client == "bea"


@pytest.mark.long
def test_an_owner_is_started_once(owners):
    again = call("owner", "start", owners.homes / "ada")
    assert again.exit_code == 2 and "owner ada runs already" in again.output
    rows = call("owners", "--sockets", owners.sockets).output.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [[name, "connected"] for name in CLIENTS]


def test_the_folder_of_sockets_is_that_of_the_projects_home_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path))
    assert sockets_root(None) == tmp_path / "sockets"
