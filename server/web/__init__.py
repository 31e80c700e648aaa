"""Common parts of all routes: problem documents, pages, ranges, limits."""
