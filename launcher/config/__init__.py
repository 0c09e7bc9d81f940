"""From YAML and overrides to checked dataclasses. Importing this package loads neither torch nor Hydra."""
