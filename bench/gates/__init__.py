"""Regression gates (docs/gates.md): what `pytest bench --gate` compares with a reference, or with committed counts."""
