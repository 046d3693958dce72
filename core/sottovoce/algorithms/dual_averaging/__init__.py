"""Dual averaging: DPSDA-C, DPSDA-PS, DPCDA, DPPS."""
