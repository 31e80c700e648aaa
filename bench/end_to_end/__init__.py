"""`bench end-to-end`: core-seconds to a given accuracy."""
