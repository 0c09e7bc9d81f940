"""The callbacks of a run: a file per feature, with the hooks that it needs. `build_callbacks` lists them."""
