"""What is measured: judges, win rates, selector accuracy, overlap with human texts, pictures."""
