"""Benchmarks: `python -m bench NAME --json FILE` measures what README and docs claim. See docs/benchmarks.md."""
