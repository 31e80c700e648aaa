"""Exports modules to files: lowering by backend, emission of the .pte, and the .ptd with the weights."""
