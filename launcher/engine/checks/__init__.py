"""Checks of what a Stepper is given, and warnings about loops that probably go wrong."""
