"""`bench variance`: what a zeroth-order step sees of the gradient."""
