"""Simulation of federated learning: hundreds of virtual devices that run the product's device half and server half.

A virtual device trains with `device_agent`'s trainer and real compiled programs, and `shared.federation` aggregates a
round's updates. Participation, drop-outs, attacks and the partition of the data among devices are simulated.
"""
