"""One command on one machine: a server and a device in a directory, which personalize a model on the owner's file."""
