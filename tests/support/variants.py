"""All methods in small federations of the debug recipe."""

SMALL = [
    "federation.rounds=2",
    "federation.clients_per_round=2",
    "federation.local_steps=1",
    "federation.batch_size=2",
    "policy.max_new_tokens=6",
    "seed=4",  # the rounds sample ada and dan, ada and bea, cyd and dan
]
OBJECTIVES = [
    "rewards={long: {kind: function, name: 'tests.support.reward_functions:score_length'},"
    " vowels: {kind: function, name: 'tests.support.reward_functions:score_vowels'}}",
    "federation.options={objectives: {long: [long], vowels: [vowels]}, ppo: {minibatch: 2, epochs: 1}}",
]
GROUPED = ["federation.method=fedbiscuit", "federation.rounds=4", "federation.keep_every=3"]
PRIVATE = "federation.options={bottleneck: {width: 4}, reward_head: {width: 3}}"
TWO_STEPS = "federation.local_steps=2"
"""For methods that divide a round's steps."""
SGD = "federation.optimizer={name: sgd, lr: 0.1, clip: null}"
PROTECTED = [
    "federation.privacy={unit: client, clip: 0.1, noise_multiplier: 0.8, delta: 0.1, simulated: true}",
    "federation.sampling=round-robin",
    "federation.max_update_ratio=null",
]
"""Clients are protected; a secret of the seed, so that runs can be compared."""
VARIANTS = {
    "fedavg": ["federation.method=fedavg"],
    "fedbis": ["federation.method=fedbis"],
    "fedbiscuit": [*GROUPED, "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1}"],
    "fedbiscuit-paper": [
        *GROUPED,
        "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1, grouping: paper, aggregator:"
        " paper}",
    ],
    "feddpo": ["federation.method=feddpo"],
    "ffa_lora": ["federation.method=ffa_lora"],
    "fedprox": ["federation.method=fedprox", "federation.options={proximal: 0.1}"],
    "fedopt": ["federation.method=fedopt"],
    "fedamp": ["federation.method=fedamp"],
    "fedcda": ["federation.method=fedcda", "federation.rounds=3", "federation.keep_every=2"],
    "fedper": ["federation.method=fedper", "federation.options={shared_layers: 1}"],
    "fedrep": ["federation.method=fedrep", TWO_STEPS],
    "fedpdpo": ["federation.method=fedpdpo", PRIVATE, TWO_STEPS],
    "perfedavg": ["federation.method=perfedavg", "federation.options={inner_steps: 1}", TWO_STEPS],
    "drift-mst": [
        "federation.method=drift",
        "federation.options={variant: mst}",
        "federation.rounds=3",
        "federation.keep_every=3",
    ],
    "drift-sp": ["federation.method=drift", "federation.options={variant: sp, delta: 0.3}"],
    "firm": ["federation.method=firm", *OBJECTIVES],
    "firm-weights": [
        "federation.method=firm",
        *OBJECTIVES,
        "federation.options.weights={long: 3, vowels: 1}",
    ],
    "fedcmoo": ["federation.method=fedcmoo", *OBJECTIVES],
    "fednova": ["federation.method=fednova", SGD],
    "scaffold": ["federation.method=scaffold", SGD],
    "fedbis-protected": [
        "federation.method=fedbis",
        "federation.options={aggregator: expected}",
        "federation.rounds=4",
        "federation.keep_every=3",
        *PROTECTED,
    ],
}
