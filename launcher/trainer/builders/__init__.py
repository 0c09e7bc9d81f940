"""What is built, checked and decided before the first step."""
