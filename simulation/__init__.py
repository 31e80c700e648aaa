"""Federation in one process tree: hundreds of virtual devices over the same device half and the same server half.

A virtual device trains with `device_agent`'s trainer and real compiled programs; a round's updates become a version by
`shared.federation`. What is simulated is who takes part, who drops out, who lies, and whose data is whose. Knows no
HTTP and no database.
"""
