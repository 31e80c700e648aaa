"""Exports of adapter versions: PEFT and GGUF files, and models with the adapter merged into the base."""
