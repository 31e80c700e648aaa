"""`bench scale`: bases from 135 million to 7 billion weights on one machine."""
