"""Models with the real shapes of public ones and random weights: shapes, weights, and the tensors of a file."""
