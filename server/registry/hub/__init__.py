"""The registry as clients of the Hugging Face Hub read it: at the server's root, by `tenant/name` and a revision."""
