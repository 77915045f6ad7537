"""Sums of tensors that do not depend on how these are cut."""
