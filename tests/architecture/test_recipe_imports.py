"""Recipes are read without the libraries that train: commands answer at once, and methods stay lazy."""

import subprocess
import sys

CODE = """
import sys
from components.recipes import load_recipe
from components.recipes.load import recipe_names
for name in recipe_names():
    load_recipe(name)
print(*sorted({module.partition(".")[0] for module in sys.modules}))
"""
HEAVY = {"torch", "transformers", "peft", "trl", "accelerate", "datasets", "pandas", "mlflow", "prefect"}


def test_all_recipes_are_read_without_heavy_libraries():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pydantic" in loaded
    assert loaded & HEAVY == set()
