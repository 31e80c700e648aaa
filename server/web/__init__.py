"""What every route shares: problem documents, pages, ranges, limits."""
