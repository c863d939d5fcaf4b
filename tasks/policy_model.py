"""The aligned policy as an MLflow pyfunc model (models from code): prompts in, completions out.

Where clients have adapters of their own, the table also has a column `client_id`, which names whose
policy answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext


class PolicyModel(PythonModel):
    """Answers the column `prompt` greedily, with the logged adapter and policy section."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the backbone and the adapter."""
        from components.config import PolicyConfig
        from components.models.backbone import choose_devices
        from components.models.policy import ClientPolicySet, Policy, has_client_adapters
        from components.recipes.inputs import verify_inputs

        section = json.loads(Path(context.artifacts["policy"]).read_text(encoding="utf-8"))
        config = PolicyConfig.model_validate(section)
        verify_inputs(config)
        adapter = Path(context.artifacts["adapter"])
        device = choose_devices()[0]
        self.clients = ClientPolicySet(config, device, adapter) if has_client_adapters(adapter) else None
        self.policy = Policy(config, device, adapter) if self.clients is None else None

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Completions of the prompts."""
        prompts = list(model_input["prompt"])
        if self.clients is not None:
            answers = self.clients.generate(prompts, list(model_input["client_id"]), seed=0)
        elif self.policy is not None:
            answers = self.policy.generate(prompts, seed=0)
        else:
            raise RuntimeError("the model was not loaded by load_context")
        return pd.DataFrame({"completion": [completions[0].text for completions in answers]})


set_model(PolicyModel())
