"""What a run can show about itself: modules that are not finite, exponents of gradients."""
