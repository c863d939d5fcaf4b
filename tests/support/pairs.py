"""Preference pairs for tests of training: prompts and completions of different lengths."""

PAIRS = [
    {
        "prompt": f"paper {i}" + " about trees" * i,
        "chosen": f"it shows that {i} holds",
        "rejected": "no " * (i + 1),
        "pair_id": str(i),
        "client_id": "ada",
        "domain": "",
    }
    for i in range(6)
]
