"""Dual averaging: DPSDA-C, DPSDA-PS, DPCDA, DPPS.

parameters  the parameters of a spec, and the conditions that raise errors or warnings
algorithm   the state machine
accounting  the privacy accountant of its messages
"""
