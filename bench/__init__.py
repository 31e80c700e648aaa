"""What we claim, measured: `python -m bench NAME --json FILE`. Speed is a ratio of two things timed in one run."""
