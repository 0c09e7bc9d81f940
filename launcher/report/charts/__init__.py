"""Charts of a run as inline SVG."""
