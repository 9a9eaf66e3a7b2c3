"""One file per action grammar. The public entry is envs.actions; import from there."""
