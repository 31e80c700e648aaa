"""What MobiZO is compared with: first order, MeZO, other adapters and other precisions."""
