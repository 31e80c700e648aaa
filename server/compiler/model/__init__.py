"""The compiled decoder: its layers, the frozen backbone around them, and quantized weights."""
