"""What is true: values, names and decisions, without a disk, a clock or a network.

Rules:
* Standard library only; no I/O. Everything here is a function of its arguments.
* Nothing here imports another package of ckptmirror.
"""
