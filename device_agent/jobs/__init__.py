"""One leased job, from lease to upload."""
