"""The API that OpenAI's clients speak: models, completions and chat, on this server's bases and adapters."""
