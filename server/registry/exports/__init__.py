"""Exports of adapter versions as PEFT and GGUF files."""
