"""Follow the leader over blocks: PD-FTGL, PD-OCG, and D-FTGL without privacy.

parameters  what a spec gives, and how a run is made of it
conditions  what is refused, and what is only reported
algorithm   the state machine of PD-FTGL and PD-OCG
gossip      how fast learners agree on a mean
tree        the noise of a binary-tree counter
accounting  what its messages cost: the meter
d_ftgl      the baseline without privacy, parameters and all
"""
