"""Which values are rounded to half, and how the loss is scaled."""
