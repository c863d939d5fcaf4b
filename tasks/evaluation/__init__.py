"""Tasks of the evaluation: answers of the policies, the judge's verdicts, questions, AlpacaEval."""
