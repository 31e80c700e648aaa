"""Secure aggregation: the server learns the sum of many devices' updates, but no single update.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS'17: pairwise masks
that cancel in the sum, one mask of each device's own, and Shamir shares of the secrets that remove the masks of devices
that drop out.

    settings      what a cohort sets, and the parameters of one round that all its devices agree on
    fixed_point   float32 updates as integers modulo 2^32 or 2^64, with room for the sum
    shamir        t-of-n shares of a 32-byte secret
    primitives    X25519, HKDF, AEAD and mask streams, as used here
    messages      the messages between device and server
    device        the device's side of each phase
    server        the server's side of each phase
    session       the phases and deadlines of one round at the server
    memory        storage of a round in memory
    redaction     reduces a device's metrics to those that reveal nothing about its data
"""
