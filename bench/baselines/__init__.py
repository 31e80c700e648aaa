"""Other people's algorithms, written from their papers, small and readable."""
