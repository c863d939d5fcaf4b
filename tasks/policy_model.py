"""The aligned policy as an MLflow pyfunc model (models from code): a table of prompts in, their completions out."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext


class PolicyModel(PythonModel):
    """Answers the column `prompt` greedily, with the adapter and the recipe's policy section that were logged."""

    def load_context(self, context: PythonModelContext) -> None:
        from components.config import PolicyConfig
        from components.models.backbone import choose_device
        from components.models.policy import Policy

        config = PolicyConfig.model_validate(json.loads(Path(context.artifacts["policy"]).read_text(encoding="utf-8")))
        self.policy = Policy(config, choose_device()[0], Path(context.artifacts["adapter"]))

    def predict(self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None) -> pd.DataFrame:
        answers = self.policy.generate(list(model_input["prompt"]), seed=0)
        return pd.DataFrame({"completion": [completions[0].text for completions in answers]})


set_model(PolicyModel())
