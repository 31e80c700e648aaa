"""Privacy budgets of users, and the privacy that jobs spend."""
