"""`bench end-to-end` and `bench options`: core-seconds to a given accuracy, and the effect of each of our choices."""
