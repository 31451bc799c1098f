"""What the kernels run on: the table of GPUs, how many clusters one holds, and the bounds that it sets on time.

arch        GPU models: limits, rates, and which model a device is
residency   clusters of CTAs that a GPU holds at once
roofline    lower bound on the time of a problem; tile and wave quantization
"""
