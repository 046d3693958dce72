"""Gossip gradient descent: DSGD, DOLA, PDOP, DPDOLA, PD-OGD, D-OGD, and DPSR.

parameters  the published methods as combinations of options, and the conditions that raise errors or warnings
schedules   step sizes and noise scales that a spec may choose
algorithm   the state machine of all of them
accounting  the privacy accountant of its messages
"""
