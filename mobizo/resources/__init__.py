"""The parts of the API, one class each; `mobizo.Client` has an instance of every class."""
