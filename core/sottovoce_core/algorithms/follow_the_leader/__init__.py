"""Follow the leader over blocks: PD-FTGL, PD-OCG, and D-FTGL without privacy.

parameters  the parameters of a spec, and the conditions that raise errors or warnings
algorithm   the state machine of PD-FTGL and PD-OCG
gossip      accelerated gossip and its rate of agreement
accounting  the noise of a binary-tree counter, and the privacy accountant of messages
d_ftgl      the baseline without privacy, with its parameters
"""
