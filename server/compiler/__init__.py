"""The compiler: a recipe and a base model become a multi-method ExecuTorch program with external weights."""
