"""Gossip gradient descent: DSGD, DOLA, PDOP, DPDOLA, PD-OGD, D-OGD, DPSR."""
