"""The pages that people use: jobs, devices, adapters, cohorts, programs and operation of the server."""
