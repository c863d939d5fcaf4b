"""Recipes and benchmarks, from a name to what can be run: loaded, checked, and with their inputs stored.

load          a recipe by name or path, with overrides and the origin of each value
checks        across its sections, without files
checked       whether it can be run here: files, data, models and memory
inputs        the files that it names, copied into a run
data_preview  the data, read and divided as a run does it
model_checks  configurations and tokenizers
estimates     memory and disk
benchmarks    many recipes of one benchmark
"""

from components.recipes.checked import check_recipe
from components.recipes.load import load_recipe

__all__ = ["check_recipe", "load_recipe"]
