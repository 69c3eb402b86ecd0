"""Training without waiting: workers update parameters that they share (servers), or average them in pairs (gossip)."""
