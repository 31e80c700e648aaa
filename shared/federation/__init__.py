"""Arithmetic of federated learning: aggregation of many devices' updates of flat B, and the update of a shared adapter.

The frozen A is the same for all devices, so the mean of the B's is the mean of the updates, and averaging is exact.
"""
