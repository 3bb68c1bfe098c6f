"""From prompts to rewarded samples in the data plane."""
