"""OpenAI's API as server and device speak it: its JSON models, and answers and errors in its form."""
