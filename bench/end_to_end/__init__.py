"""`bench end-to-end` and `bench options`: core-seconds to a given accuracy, and what each choice of ours is worth."""
