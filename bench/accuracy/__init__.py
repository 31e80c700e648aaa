"""`bench accuracy`: accuracy of each training method at the same budget."""
