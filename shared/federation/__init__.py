"""Federation's arithmetic: how many devices' updates of flat B become one, and how that moves a shared adapter.

The frozen A is the same for all, so the mean of the B's *is* the mean of the updates: averaging is exact here.
NumPy only: knows no torch, no server, no device and no network.
"""
