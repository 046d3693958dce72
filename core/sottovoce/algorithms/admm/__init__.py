"""Consensus ADMM: plain, and with dual (DVP) or primal (PVP) variable perturbation."""
