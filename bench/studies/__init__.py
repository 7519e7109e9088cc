"""Studies: scripts that measure one question on real models and machines, and print the tables that docs/ show."""
