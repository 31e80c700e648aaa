"""Secure aggregation: many devices' updates become their sum, and nobody sees any single one of them.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS'17: pairwise masks
that cancel in the sum, a mask of each device's own, and Shamir shares of what removes the masks of who dropped out.

    settings      what a cohort sets, and the parameters of one round that all its devices agree on
    fixed_point   float32 updates as integers modulo 2^32 or 2^64, with room for the sum
    shamir        t-of-n shares of a 32-byte secret
    primitives    X25519, HKDF, ChaCha20 and AEAD, as used here
    messages      what device and server say to each other
    masks         streams of masks, added to a vector in blocks
    device        the device's side of each phase
    server        the server's side of each phase

Knows no HTTP, no database and no torch; needs numpy and cryptography.
"""
