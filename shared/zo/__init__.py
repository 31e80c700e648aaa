"""Zeroth-order training: noise, the layout of LoRA-B, encoding of examples, trajectories and their replay."""
