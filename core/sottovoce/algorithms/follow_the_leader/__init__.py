"""Follow the leader over blocks: PD-FTGL, PD-OCG, D-FTGL."""
