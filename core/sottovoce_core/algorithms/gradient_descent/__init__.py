"""Gossip gradient descent: DSGD, DOLA, PDOP, DPDOLA, PD-OGD, D-OGD, and DPSR.

parameters  the published methods, as choices of parts, how a run is made of them, what is refused and what is only reported
choices     step sizes and noises that a spec may choose
algorithm   the state machine of all of them
accounting  what its messages cost: the meter
"""
