"""What the gates, studies and tests run on: tiny models, made models of real shapes, and the demo model's recipe."""
