"""Readers of base models: Hugging Face directories and GGUF files, under one set of tensor names."""
