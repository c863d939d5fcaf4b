"""Files to start from, for `fed-rlhf new`: a recipe for own pairs, a package with a method or a source."""

from __future__ import annotations

import re
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

from components.config import RecipeError, UserError
from components.io import write_atomically

RECIPE = """\
# Pairs of your own with the recipe debug, whose random model learns nothing. When `fed-rlhf check` reads the
# pairs, extend another recipe, such as summarization/demo, and name templates and lengths that fit your texts
# in place of its own: docs/tutorials/own-data.md, "A real run".
extends: debug
name: "$name"
data:
  source: jsonl
  path: pairs.jsonl               # rows with prompt, chosen, rejected, client_id
  clients: null                   # every owner is a client
tracking: {experiment: "$name", registered_model: $name-policy}
"""
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
dependencies = ["fed-rlhf"]

[project.entry-points."fed_rlhf.${kind}s"]
$name = "$package.$kind:$type"

[tool.setuptools]
packages = ["$package"]
"""
METHOD = '''\
"""$name: what it does, in one line, which `fed-rlhf methods` shows.

phi_m   = OPTIM(m, phi_r, K)   for the sampled clients m, by DPO
phi_r+1 = sum of w_m phi_m / sum of w_m,   w_m: the clients' shares of the training pairs
"""

from __future__ import annotations

from pydantic import Field

from fed_rlhf import AveragingMethod, DpoObjective, Local


class $type(AveragingMethod):
    """Options of $name: the keys of federation.options."""

    objective: DpoObjective = Field(default_factory=DpoObjective, description="What the clients minimize.")

    def local(self) -> Local:
        """What a client does in a round."""
        return Local(self.objective)
'''
METHOD_TEST = """\
import torch

from fed_rlhf import AdapterStore, Client, Federation, Server, StepAnswers, Sum, load_recipe
from $package.method import $type


def test_the_server_takes_the_mean_of_the_clients(tmp_path):
    store = AdapterStore(tmp_path)
    clients = tuple(Client(name=name, training_pairs=4, validation_pairs=1, weight=0.5) for name in "ab")
    federation = Federation(clients=clients, initial=store.put({"w": torch.tensor([0.0])}))
    method = $type()
    assert method.local().objective is method.objective
    state = method.start(federation, seed=0)
    # The weighted sum of a client with 1 and one with 3, each with half of the pairs.
    total = Sum({"w": torch.tensor([2.0])}, weight=1.0, clients=("a", "b"), asked=2)
    answers = StepAnswers(clients=total.clients, sums={"policy": total})
    state = method.aggregate(state, (), Server(load_recipe("debug").federation, store, answers))
    assert store.get(state.adapters["policy"])["w"].item() == 2.0


def test_recipes_take_the_method():
    assert isinstance(load_recipe("debug", ["federation.method=$name"]).federation.options, $type)
"""
SOURCE = '''\
"""Source `$name`: pairs of owners, with what tells them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fed_rlhf import DataConfig, Pair, PairSource, SourceData, assign_splits, generator, hold_out


class $type(PairSource):
    """Options of the source $name: the keys of data.options."""

    is_local: ClassVar[bool] = True  # nothing is downloaded, so `fed-rlhf check` reads the data

    owners: int = Field(12, ge=1, description="Number of owners of the pairs.")

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Pairs with splits; a share of them is reserved for the judge and the server."""
        pairs = [self.make_pair(n, seed) for n in range(240)]
        splits = assign_splits((pair.split_group for pair in pairs), data.validation, data.test, seed)
        pairs = [replace(pair, split=split) for pair, split in zip(pairs, splits, strict=True)]
        return hold_out(pairs, "$name", self.shares, seed, dropped={})

    def make_pair(self, number: int, seed: int) -> Pair:
        """A pair: read yours in place of it."""
        owner = int(generator(seed, "$name", number).integers(self.owners))
        return Pair(
            prompt=f"Question {number}?",
            chosen=f"A helpful answer to question {number}.",
            rejected="No idea." if number % 2 else f"I do not know the answer to question {number}, sorry.",
            client_id=f"owner-{owner:02d}",
        )
'''
SOURCE_TEST = """\
from fed_rlhf import load_recipe
from $package.source import $type

SETTINGS = ["data.source=$name", "data.options={owners: 6}", "data.partition=natural", "data.clients=null"]


def test_every_pair_has_an_owner_a_split_and_two_answers():
    data = load_recipe("debug", SETTINGS).data
    assert isinstance(data.options, $type)
    pairs = data.options.load(data, seed=0).pairs
    assert {pair.split for pair in pairs} == {"train", "validation", "test"}
    assert {pair.client_id for pair in pairs} <= {f"owner-{n:02d}" for n in range(6)}
    assert all(pair.chosen != pair.rejected for pair in pairs)
"""


def write_scaffold(kind: str, name: str) -> list[str]:
    """Write a recipe or a package into the working folder.

    Args:
        kind: `recipe`, `method` or `source`.
        name: of the recipe, the method or the source; of the package, too.

    Returns:
        lines that say what was written, and what to do next.

    Raises:
        RecipeError: the name cannot be used.
        UserError: there is such a file or folder.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise RecipeError(
            f"the name '{name}' cannot be used: take lower-case letters, digits and single '-'."
        )
    if kind != "recipe":
        _refuse_known(kind, name)
    words = name.split("-")
    package = "_".join(words)
    type_name = "".join(map(str.capitalize, [*words, kind]))
    values = {"name": name, "kind": kind, "package": package, "type": type_name}
    path = Path(f"{name}.yaml" if kind == "recipe" else name)
    if path.exists():
        raise UserError(f"{path} is there already: choose another name, or delete it.")
    for file, text in _files(kind, path, package).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, Template(text).substitute(values).encode())
    if kind == "recipe":
        return [f"wrote {path}", f"Next  fed-rlhf check {path}"]
    way = f"run debug federation.method={name}"
    if kind == "source":
        way = f"check debug data.source={name} 'data.options={{}}' data.partition=natural data.clients=null"
    return [
        f"wrote {path}/: {path / package / f'{kind}.py'} is what you change",
        f"Next  pip install -e ./{path} && python -m pytest {path}/tests",
        f"      fed-rlhf {way}",
    ]


def _files(kind: str, path: Path, package: str) -> dict[Path, str]:
    if kind == "recipe":
        return {path: RECIPE}
    module, test = (METHOD, METHOD_TEST) if kind == "method" else (SOURCE, SOURCE_TEST)
    return {
        path / "pyproject.toml": PROJECT,
        path / package / "__init__.py": "",
        path / package / f"{kind}.py": module,
        path / "tests" / f"test_{package}.py": test,
    }


def _refuse_known(kind: str, name: str) -> None:
    from components.config.data import SOURCES
    from components.config.federation import METHODS

    if name in (METHODS if kind == "method" else SOURCES).names():
        raise RecipeError(
            f"there is a {kind} '{name}' already, and no package replaces it: choose another name."
        )
    package = name.replace("-", "_")
    if iskeyword(package) or find_spec(package) is not None:
        raise RecipeError(f"Python has a module or a word '{package}' already: choose another name.")
