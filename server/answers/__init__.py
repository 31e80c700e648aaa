"""Answers that are kept, so that a request which is sent again is answered again and not done again."""
