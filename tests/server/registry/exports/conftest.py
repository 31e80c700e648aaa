"""What tests of the formats share."""


def pytest_configure(config):
    for library in ("executorch", "torch", "copyreg", "transformers", "peft"):
        config.addinivalue_line("filterwarnings", f"ignore:::{library}")
