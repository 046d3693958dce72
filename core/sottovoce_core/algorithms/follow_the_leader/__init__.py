"""Follow the leader over blocks: PD-FTGL, PD-OCG, and D-FTGL without privacy.

parameters  what a spec gives, how a run is made of it, what is refused and what is only reported
algorithm   the state machine of PD-FTGL and PD-OCG
gossip      how fast learners agree on a mean
accounting  the noise of a binary-tree counter, and what messages cost: the meter
d_ftgl      the baseline without privacy, parameters and all
"""
