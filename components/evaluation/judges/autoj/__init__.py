"""The Auto-J judge with its pairwise protocol with ties (Li et al. 2023, arXiv 2310.05470).

It is the judge of FedBiscuit's table 1. A generative judge reads a query and two responses,
compares them in words, and ends with a decision for response 1, response 2 or a tie. As in the
authors' code (GAIR-NLP/auto-j) decoding is greedy, the instruction stands between "[INST] " and "
[/INST]", and the verdict is parsed after the last "final decision is". The query is the user
message of the policy's template (templates.user_message), because a prompt alone may not state the
task, such as a post that is to be summarized.

The instruction is not the authors' text (prompt_templates/autoj/pairwise.txt). To use theirs, save
the text of `pairwise_tie` in codes/usage/constants_prompt.py of that repository to a file, with its
placeholders {prompt}, {response} and {response_another}, and name the file as `prompt_file`.

The judge runs in this process with transformers, or behind an OpenAI-compatible endpoint.
GAIR/autoj-13b-GPTQ-4bits, the 4-bit form, is a GPTQ checkpoint. transformers reads it with
`optimum` and `gptqmodel`, which this project does not install.
"""

from components.evaluation.judges.autoj.autoj_judge import AutoJ, AutoJSection

__all__ = ["AutoJ", "AutoJSection"]
