"""Results: what a device hands in for a job, which becomes an adapter version or counts in a cohort's round."""
