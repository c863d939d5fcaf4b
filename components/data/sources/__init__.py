"""The sources of pairs and prompts.

They are registered in SOURCES and PROMPT_SOURCES (components/config/data.py); source.py describes how
to add one.

Pairs:

    aclsum              embedded: synthetic annotators over 250 papers' expert summaries
    auto-j              file: Auto-J's pairwise set, human verdicts in 58 scenarios
    chitchat            embedded: human conversations, a participant is a client
    code-vulnerability  hub: secure and vulnerable code in 11 languages (FedPDPO D.1.1)
    csv                 the user's own pairs
    hh-rlhf             hub: Anthropic's helpful and harmless dialogues
    imdb                hub: film reviews with two continuations (FedPDPO D.1.1)
    jsonl               the user's own pairs
    mixture             several sources, each a client (FedPDPO D.1.2, cross-domain)
    owners              the pairs stay with their owners, who prepare them (components/owners)
    parquet             the user's own pairs
    py-dpo              hub: Python code (FedPDPO D.1.1)
    shp                 hub: answers on Reddit with votes of readers (FedBiscuit section 6)
    thoughts            file: trees of thoughts, a question set is a client (DRIFT section 2.2)
    tldr                hub: OpenAI's TL;DR comparisons, a worker is a client (FedBiscuit section 6)
    ultrafeedback       hub: instructions of many kinds (FedPDPO D.1.1)
    webgpt              hub: OpenAI's comparisons of long answers from the web (FedPDPO D.1.1)

Prompts of the server, in place of those that come with the pairs (data.align_prompts and
data.test_prompts of a recipe):

    alpaca_eval         hub: AlpacaEval's 805 instructions (FedBiscuit section 7.1)
    safe-rlhf           hub: PKU's prompts about harm (FedBiscuit table 5)
"""

from components.data.sources.source import (
    PairSource,
    PromptSource,
    Source,
    check_columns,
    load,
    load_prompts,
)

__all__ = [
    "PairSource",
    "PromptSource",
    "Source",
    "check_columns",
    "load",
    "load_prompts",
]
