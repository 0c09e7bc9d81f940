"""What is looked up after a step: non-finite gradients, exponents, time."""
