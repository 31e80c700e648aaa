"""What private jobs spend of their users' privacy, and the budgets that hold them to it."""
