"""MaxSim and the other operators alone."""
