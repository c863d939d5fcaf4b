"""What the server does with a trained selector: sample completions, label pairs, align the policy by DPO."""
