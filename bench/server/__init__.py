"""`bench server`: the server under load and faults."""
