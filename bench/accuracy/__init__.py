"""`bench accuracy`: how well each training method does at the same budget."""
