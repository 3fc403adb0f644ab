"""Real servers on a CPU whose steps take as long as a modelled GPU's."""
